# What forward and backward have besides in training: a LoRA adapter, what forward keeps, gradients.

cdef class Adapter:
    """LoRA of a layer's experts: each projection named has weights W + scale * B A.

    spec: ExpertSpec. pairs: {projection: (a, b)}: a [experts, rank, inputs], b [experts, outputs, rank], float32 or uint16 holding
    bfloat16 bits, C-contiguous; one rank for all. It holds the arrays and reads them during calls, so that what their owner changes in
    place between two calls counts in the second.
    Raises InputError.
    """

    cdef kt_adapter adapter
    cdef readonly object spec
    cdef readonly size_t rank
    cdef dict _held

    def __cinit__(self, spec, double scale, pairs):
        memset(&self.adapter, 0, sizeof(kt_adapter))
        self.spec, self._held, self.adapter.scale = spec, {}, scale
        if not pairs:
            raise InputError(f"pairs must have one of {PROJECTIONS} at least, found none")
        for projection, (a, b) in pairs.items():
            if projection not in PROJECTIONS:
                raise InputError(f"projections are {PROJECTIONS}, found {projection!r}")
            a, b = np.asarray(a), np.asarray(b)
            rank = a.shape[1] if a.ndim == 3 else 0
            if not 1 <= rank <= RANK_MAX or self.rank not in (0, rank):
                raise InputError(f"{projection}'s a must be [experts, rank, inputs], one rank of 1 to {RANK_MAX}, found {list(a.shape)}")
            self.rank = self.adapter.rank = rank
            p = PROJECTIONS.index(projection)
            self._take(&self.adapter.of[p].a, f"{projection}'s a", a, self.shapes(projection)[0])
            self._take(&self.adapter.of[p].b, f"{projection}'s b", b, self.shapes(projection)[1])
            self._held[projection] = a, b

    def shapes(self, str projection):
        """The shapes of a projection's a and b."""
        n, k = self.spec.shape(projection)
        return (self.spec.num_experts, self.rank, k), (self.spec.num_experts, n, self.rank)

    cdef int _take(self, kt_low_rank *to, str name, array, shape) except -1:
        if array.dtype not in (np.float32, np.uint16) or array.shape != shape or not array.flags.c_contiguous:
            raise InputError(f"{name} must be float32 or uint16 {list(shape)}, contiguous, found {array.dtype} {list(array.shape)}")
        to.bf16 = array.dtype == np.uint16
        to.data = <const void *><size_t>array.ctypes.data
        return _expect_aligned(name, to.data, array.dtype.itemsize)

    def __contains__(self, projection):
        return projection in self._held


RANK_MAX = 256


cdef list _sizes(spec):
    return [spec.num_experts, spec.hidden, spec.intermediate]


cdef float *_numbers(str name, array, shape, list held) except NULL:
    """The memory of a float32 array of that shape, which may be written."""
    array = np.asarray(array)
    if array.dtype != np.float32 or array.shape != tuple(shape) or not array.flags.c_contiguous or not array.flags.writeable:
        raise InputError(f"{name} must be writeable float32 {list(shape)}, contiguous, found {array.dtype} {list(array.shape)}")
    held.append(array)
    cdef float *numbers = <float *><size_t>array.ctypes.data
    _expect_aligned(name, numbers, sizeof(float))
    return numbers


cdef int _take_training(_Batch batch, list held, spec, Adapter adapter, saved) except -1:
    """Put the adapter, and the arrays of what is kept, into a batch."""
    cdef kt_batch *b = &batch.batch
    if adapter is not None:
        if _sizes(adapter.spec) != _sizes(spec):
            raise InputError(f"the adapter is of experts [number, hidden, intermediate] {_sizes(adapter.spec)}, these are {_sizes(spec)}")
        b.adapter = &adapter.adapter
        held.append(adapter)
    if saved is None:
        return 0
    g, u, t = saved
    pairs = b.tokens * b.top_k
    b.kept.g = _numbers("saved g", g, (pairs, spec.intermediate), held)
    b.kept.u = _numbers("saved u", u, (pairs, spec.intermediate), held)
    if adapter is not None:
        b.kept.t = _numbers("saved t", t, (pairs, len(PROJECTIONS), adapter.rank), held)
    return 0


cdef int _take_gradients(kt_backward *to, list held, Adapter adapter, gradients) except -1:
    for projection, (da, db) in (gradients or {}).items():
        if adapter is None or projection not in adapter:
            raise InputError(f"there is no adapter of {projection!r} whose gradients could be had")
        p = PROJECTIONS.index(projection)
        shape_a, shape_b = adapter.shapes(projection)
        to.of[p].a = _numbers(f"gradient of {projection}'s a", da, shape_a, held)
        to.of[p].b = _numbers(f"gradient of {projection}'s b", db, shape_b, held)
    return 0
