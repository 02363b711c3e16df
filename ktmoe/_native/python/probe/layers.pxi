# What a layer has of its experts, one by one.


def folded(_PackedExperts layer not None):
    """{(expert, projection): whether its scales are folded: 0, or of how many bfloat16 numbers a weight is the sum}."""
    cdef size_t e, p, missing, num_experts = layer.experts.layer.num_experts
    cdef uint8_t[:, ::1] terms = np.zeros((num_experts, 3), np.uint8)
    cdef bint closed
    with nogil:
        kt_pool_lock()
        closed, missing = layer.experts.layer.shards == NULL, layer.experts.missing
        for e in range(0 if closed or missing else num_experts):
            for p in range(layer.experts.matrices):
                terms[e, p] = kt_matrix_of(&layer.experts, 0, e, p).kernel.folded
        kt_pool_unlock()
    layer._check_whole(closed, missing)
    return {(e, name): int(terms[e, p]) for e in range(num_experts) for p, name in enumerate(layer._names)}


def unpack(PackedLayer layer not None, size_t expert, str projection):
    """One matrix's arrays of export(), by name."""
    stored = layer._spec.formats[projection].empty(*layer._shape(PROJECTIONS.index(projection)))
    layer.export(expert, [{projection: stored}])
    return stored
