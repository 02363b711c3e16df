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


def packed_at(_PackedExperts layer not None):
    """[(shard, address, bytes)] of each matrix, where it lies now; InputError if one was not packed."""
    cdef size_t s, e, p, n, k, missing
    cdef kt_outcome outcome
    cdef size_t num_experts = layer.experts.layer.num_experts, matrices = layer.experts.matrices
    cdef size_t[:, :, ::1] at = np.zeros((layer.num_shards, num_experts, matrices), np.uintp)
    with nogil:
        kt_pool_lock()
        outcome, missing = layer._state(), layer.experts.missing
        for s in range(layer.num_shards if outcome == KT_DONE else 0):
            for e in range(num_experts):
                for p in range(matrices):
                    at[s, e, p] = <size_t>kt_matrix_of(&layer.experts, s, e, p).data
        kt_pool_unlock()
    layer._check_outcome(outcome)
    layer._check_whole(False, missing)
    found = []
    for s, columns in enumerate(layer._columns):
        for p in range(matrices):
            n, k = (layer.experts.layer.hidden, columns) if p == 2 else (columns, layer.experts.layer.hidden)
            nbytes = (n + KT_PANEL - 1) // KT_PANEL * kt_panel_bytes(&layer.experts.formats[p], k)
            found += [(s, at[s, e, p], nbytes) for e in range(num_experts)]
    return found
