# Arenas in files: a layer that was packed goes into one, and another layer maps it.

#: The version of what an arena is: the experts in order, all matrices of each. Families have versions of their own.
ARENA_VERSION = 1
#: What an arena in a file should begin at a multiple of; it must at one of PAGE_BYTES.
HUGE_PAGE_BYTES = KT_HUGE_BYTES
PAGE_BYTES = KT_PAGE_BYTES


cdef class ArenaFile:
    """An open file that holds a layer's arenas.

    name: for messages. fd: a descriptor, of which it makes one of its own. offsets: of each shard's arena, multiples of
    PAGE_BYTES. The file must stay as it is now: its size, and the time of its last change.
    """

    cdef kt_arena_file _file
    cdef bint _held  # its descriptor
    cdef readonly str name

    def __cinit__(self, str name, int fd, offsets):
        self.name = name
        self._file.fd = kt_os_hold(fd)
        if self._file.fd < 0:
            raise CacheError(f"{name}: expected a file that can be mapped: {os.strerror(last_errno)}")
        self._held = True
        if not kt_os_file_state(fd, &self._file.state):
            raise CacheError(f"{name}: expected a file that can be looked at, found none")
        if len(offsets) > KT_SHARDS_MAX or any(offset % KT_PAGE_BYTES for offset in offsets):
            raise CacheError(f"{name}: arenas: expected at multiples of {KT_PAGE_BYTES} bytes, found them at {list(offsets)}")
        for i, offset in enumerate(offsets):
            self._file.offsets[i] = offset

    def __dealloc__(self):
        if self._held:
            kt_os_let_go(self._file.fd)

    cdef object map(self, kt_experts *experts, const size_t (*columns)[2]):
        cdef int error = kt_experts_map_file(experts, columns, &self._file)
        if error == KT_FILE_DIFFERS:
            raise CacheError(f"{self.name}: expected {self._file.state.bytes} bytes that do not change, found other ones")
        if error == errno.ENOMEM:
            raise OutOfMemoryError(f"{self.name}: the system refused addresses to map it to")
        if error:
            raise CacheError(f"{self.name}: expected a file that can be mapped: {os.strerror(error)}")


def adopt(_PackedExperts layer, seen, biases, factors):
    """Take all experts as they lie in the arenas of an ArenaFile. No byte of them is read.

    seen: what seen() gave when they were packed. biases, factors: what numbers() gave.
    Raises FormatError for a bias or a factor that is not finite.
    """
    cdef kt_given given[3]
    cdef kt_scan scans[3]
    cdef const float[:, ::1] bias, factor
    cdef const uint8_t[:, :, ::1] of = seen
    cdef size_t e, p
    cdef size_t steps[3][2]
    cdef const float *at[3][2]
    cdef int error = 0
    cdef kt_outcome outcome = KT_DONE
    cdef size_t num_experts = layer.experts.layer.num_experts
    memset(at, 0, sizeof(at))
    memset(scans, 0, sizeof(scans))
    for p, projection in enumerate(layer._names):
        given[p] = layer._kernels[p]
        if projection in biases:
            bias = biases[projection]
            at[p][0], steps[p][0] = &bias[0, 0], bias.shape[1]
        if projection in factors:
            factor, stated = factors[projection], layer._spec.formats[projection].factor
            at[p][1], steps[p][1] = &factor[0, 0], factor.shape[1]
            given[p].factor_per_row, given[p].divides = stated.per_row, stated.divides
    with nogil:
        kt_pool_lock()
        for e in range(num_experts):
            for p in range(layer.experts.matrices):
                scans[p].low, scans[p].high, scans[p].negative = of[e, p, 0], of[e, p, 1], of[e, p, 2] != 0
                given[p].bias = at[p][0] + e * steps[p][0] if at[p][0] else NULL
                given[p].factor = at[p][1] + e * steps[p][1] if at[p][1] else NULL
            outcome = kt_experts_install(&layer.experts, e, given, scans, &error)
            if outcome != KT_DONE:
                break
        kt_pool_unlock()
    if outcome == KT_FAILED:
        _raise(error, f"{layer._file}: biases and factors of {layer._spec.one(e)}")
    layer._check_outcome(outcome)
    if outcome == KT_REFUSED:
        raise FormatError(f"{layer._file}: {layer._spec.one(e)}: a bias or a factor is not finite, or a divisor is 0")
    if outcome == KT_TOO_MANY_FORMS:
        raise UnavailableError(f"{layer._table.name}'s kernels take x in more forms than one layer can have: {KT_X_FORMS}")


def seen(_PackedExperts layer):
    """uint8 [num_experts, matrices, 3]: of each matrix the least and the greatest exponent of its scales, and whether any is negative.
    It decides which kernels are chosen."""
    cdef size_t e, p, num_experts = layer.experts.layer.num_experts
    cdef uint8_t[:, :, ::1] to = np.zeros((num_experts, len(layer._names), 3), np.uint8)
    cdef kt_outcome outcome
    cdef size_t missing
    with nogil:
        kt_pool_lock()
        outcome, missing = layer._state(), layer.experts.missing
        for e in range(num_experts if outcome == KT_DONE and not missing else 0):
            for p in range(layer.experts.matrices):
                to[e, p, 0], to[e, p, 1] = layer.experts.scans[3 * e + p].low, layer.experts.scans[3 * e + p].high
                to[e, p, 2] = layer.experts.scans[3 * e + p].negative
        kt_pool_unlock()
    layer._check_outcome(outcome)
    layer._check_whole(False, missing)
    return np.asarray(to)


def numbers(_PackedExperts layer):
    """({projection: biases, float32 [num_experts, n]}, {projection: factors, float32 [num_experts, n] or [num_experts, 1]}).

    Without those that no expert has; a bias that one has not is 0.
    """
    cdef kt_numbers of[3]
    cdef float[:, ::1] bias, factor
    cdef size_t e, p, num_experts = layer.experts.layer.num_experts
    cdef float *at[3][2]
    cdef size_t steps[3]
    cdef kt_outcome outcome
    cdef size_t missing
    biases = {p: np.zeros((num_experts, layer._shape(p)[0]), np.float32) for p in range(layer.experts.matrices)}
    factors = {p: np.zeros((num_experts, layer._shape(p)[0]), np.float32) for p in range(layer.experts.matrices)}
    for p in range(layer.experts.matrices):
        bias, factor = biases[p], factors[p]
        at[p][0], at[p][1], steps[p] = &bias[0, 0], &factor[0, 0], bias.shape[1]
    memset(of, 0, sizeof(of))
    with nogil:
        kt_pool_lock()
        outcome, missing = layer._state(), layer.experts.missing
        for e in range(num_experts if outcome == KT_DONE and not missing else 0):
            for p in range(layer.experts.matrices):
                of[p].bias, of[p].factor = at[p][0] + e * steps[p], at[p][1] + e * steps[p]
            kt_experts_numbers(&layer.experts, e, of)
        kt_pool_unlock()
    layer._check_outcome(outcome)
    layer._check_whole(False, missing)
    formats = [layer._spec.formats[projection] for projection in layer._names]
    widths = {p: f.factor.shape(factors[p].shape[1])[0] for p, f in enumerate(formats) if f.factor}
    return (
        {layer._names[p]: array for p, array in biases.items() if of[p].has_bias},
        {layer._names[p]: np.ascontiguousarray(factors[p][:, :width]) for p, width in widths.items()},
    )
