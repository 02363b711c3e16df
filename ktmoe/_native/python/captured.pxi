# Calls that are part of CUDA graphs: captured/ runs them, on a thread of its own and without the GIL.

cdef class GraphMark:
    """Says whether a CUDA graph is still there, which drops it by drop_function, without the GIL."""

    cdef kt_mark *mark

    def __cinit__(self):
        self.mark = kt_mark_make()
        if self.mark == NULL:
            raise OutOfMemoryError("capturing a CUDA graph: the operating system refused memory")

    def __dealloc__(self):
        if self.mark != NULL:
            kt_mark_drop(self.mark)

    def hold(self):
        """Hold the mark for a graph that will drop it. Returns what the graph has to give drop_function."""
        kt_mark_hold(self.mark)
        return <size_t>self.mark

    @property
    def dropped(self):
        """Whether the graph that held the mark is gone."""
        return self.mark.holders == 1


@cython.no_gc_clear  # the queue may know it until it is gone
cdef class CallRecord:
    """One call of a layer in a CUDA graph. A graph puts submit_function and await_function into a stream, with its address.

    x, y: uint16 (bf16 bits) [tokens, hidden]; ids: int64 and weights: float32, [tokens, top_k]: what each replay copies to and from.
    mask, on_gpu: uint8 [num_experts], 0 and not 0 = skip; they are read in each replay. urgent_slots, late: of a call that defers
    experts, else None both. A token's slots with so many greatest weights, of equal ones the first, run first, and so does any expert
    of such a slot in all tokens; what the others give goes to late, as y. earlier: the CallRecord whose late is added to y, or None.
    scratch: as many bytes as scratch_bytes() says, aligned to 8; calls may share it. It has x and y in float32, then ids, int64, as the
    last replay read them, those that it ran first and those that it deferred, with -1 for others.
    """

    cdef kt_record record
    cdef _Batch _batch
    cdef PackedLayer _layer
    cdef readonly CallRecord earlier
    cdef list _held

    def __cinit__(self, PackedLayer layer, x, ids, weights, y, const uint8_t[::1] mask, const uint8_t[::1] on_gpu, urgent_slots,
                  uint16_t[:, ::1] late, CallRecord earlier, uint8_t[::1] scratch):
        cdef kt_record *r = &self.record
        cdef kt_record_scratch *s = &r.scratch
        cdef size_t hidden = layer.experts.layer.hidden, num_experts = layer.experts.layer.num_experts
        batch = _Batch(ids, weights, mask, num_experts)
        batch.take_x(x, hidden)
        batch.take_y(y, hidden)
        if batch.empty or batch.batch.dtype != KT_BF16:
            raise InputError(f"a call in a CUDA graph needs bfloat16 and a token, found {x.dtype} {list(x.shape)}")
        if <size_t>on_gpu.shape[0] != num_experts:
            raise InputError(f"on_gpu must be [{num_experts}], found {[on_gpu.shape[0]]}")
        cdef size_t tokens = batch.batch.tokens, slots = batch.batch.tokens * batch.batch.top_k
        if <size_t>scratch.shape[0] < CallRecord.scratch_bytes(tokens, batch.batch.top_k, hidden, num_experts):
            raise InputError(f"scratch is too small: {scratch.shape[0]} bytes")
        r.experts, r.batch, r.on_gpu, r.urgent_slots = &layer.experts, batch.batch, &on_gpu[0], batch.batch.top_k
        if late is not None:
            batch._check("late", &late[0, 0], KT_BF16, late.shape[0], late.shape[1], hidden)
            r.urgent_slots, r.late = urgent_slots, &late[0, 0]
        if earlier is not None:
            if earlier.record.late == NULL or earlier.record.batch.tokens != tokens or earlier._layer.experts.layer.hidden != hidden:
                raise InputError("earlier must be a call that defers experts, of the same shape")
            r.earlier = &earlier.record
        _expect_aligned("scratch", &scratch[0], sizeof(int64_t))
        s.ids = <int64_t *>&scratch[0]
        s.now, s.later = s.ids + slots, s.ids + 2 * slots
        s.y = <float *>(s.ids + 3 * slots)
        s.on_gpu = <uint8_t *>(s.y + tokens * hidden)
        s.urgent = s.on_gpu + num_experts
        self._batch, self._layer, self.earlier, self._held = batch, layer, earlier, [on_gpu, late, scratch]

    @staticmethod
    def scratch_bytes(size_t tokens, size_t top_k, size_t hidden, size_t num_experts):
        """Bytes of scratch memory that calls of this shape need."""
        return tokens * hidden * sizeof(float) + 3 * tokens * top_k * sizeof(int64_t) + 2 * num_experts

    def __dealloc__(self):
        with nogil:
            kt_queue_forget(&self.record)

    @property
    def address(self):
        """The address that submit_function and await_function take."""
        return <size_t>&self.record

    @property
    def idle(self):
        """Whether no call of the record is queued or runs."""
        return bool(kt_queue_idle(&self.record))

    def check(self, str what):
        """Raise how a call failed, once. what: the message's first words."""
        cdef int error
        cdef kt_outcome outcome = kt_queue_take_outcome(&self.record, &error)
        if outcome == KT_CLOSED:
            raise ClosedError(f"{what}: the layer was closed, or its weights were loaded again")
        if outcome == KT_INCOMPLETE:
            raise InputError(f"{what}: not all matrices of this layer were packed")
        if outcome == KT_FILE_CHANGED:
            raise CacheError(f"{what}: {self._layer._file} was changed since it was mapped")
        if outcome == KT_FAILED:
            _raise(error, what)


def start_captured_calls():
    """Start the thread that runs what replays submit, unless it runs."""
    cdef int error = kt_queue_start()
    if error:
        raise UnavailableError(f"the thread for CUDA graphs cannot be started: {os.strerror(error)}")


def close_captured_calls():
    """Wait, before the process ends, for the call that runs; later ones are dropped."""
    with nogil:
        kt_queue_close()


def captured_failures():
    """How many CallRecords failed and were not asked since."""
    return kt_queue_failures()


#: Addresses of C functions that take an address: host functions of a stream, and the destructor of what a graph holds.
submit_function, await_function, drop_function = <size_t>&kt_queue_submit, <size_t>&kt_queue_await, <size_t>&kt_mark_drop
