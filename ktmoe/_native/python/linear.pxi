# Packed dense matrices: each is the only matrix of one expert. Several are computed in one call.

#: Matrices of a call.
LINEARS_MAX = KT_LINEARS_MAX
#: Outputs of a packed panel.
PANEL = KT_PANEL


cdef class PackedLinear(_PackedExperts):
    """A packed dense matrix. Made as _PackedExperts is, of LinearWeights."""

    def forward(self, x, out):
        """y into out. x: uint16 (bf16 bits) or float32 [tokens, k]. out: of x's dtype or float32, [tokens, n]."""
        linear_forward((self,), x, (0,), (out,))

    def backward(self, grad_y, grad_x):
        """grad_y W into grad_x. grad_y: uint16 (bf16 bits) or float32 [tokens, n]. grad_x: of its dtype or float32, [tokens, k]."""
        linear_backward((self,), (grad_y,), (grad_x,))

    def read_rows(self, numbers, arrays):
        """Rows of the matrix into arrays, by name: codes and numbers of groups as the order of rows has them, with numbers of its
        own for each row: float32 scales where rows share them, zero points as they are subtracted, a factor for each row.

        numbers: int64 [count], of rows, each within the matrix. It is not changed meanwhile. arrays: C-contiguous.
        Raises FormatError for an array of another size; ClosedError, CacheError.
        """
        cdef kt_read_rows to
        cdef const int64_t[::1] rows = numbers
        cdef uint8_t[::1] bytes_of
        cdef float[::1] factors
        cdef int error = 0
        cdef kt_outcome outcome
        cdef size_t missing, k = self.experts.layer.hidden
        cdef const kt_format *f = &self.experts.formats[0]
        memset(&to, 0, sizeof(to))
        to.numbers, to.count = &rows[0], rows.shape[0]
        bytes_of = _bytes("codes", arrays["codes"], to.count * kt_codes_bytes(f, k))
        to.codes = &bytes_of[0]
        weight_format = self._spec.formats["weight"]
        for i, (label, how) in enumerate(_group_arrays(weight_format)):
            if how:
                bytes_of = _bytes(label, arrays[label], to.count * kt_group_bytes(&f.groups[i], k))
                to.groups[i] = &bytes_of[0]
        if weight_format.factor:
            factors = _bytes("factor", arrays["factor"], to.count * sizeof(float)).view(np.float32)
            to.factors = &factors[0]
        with nogil:
            kt_pool_lock()
            outcome = kt_experts_read_rows(&self.experts, &to, &error)
            missing = self.experts.missing if outcome == KT_INCOMPLETE else 0
            kt_pool_unlock()
        self._check_outcome(outcome)
        self._check_whole(False, missing)
        if outcome == KT_FAILED:
            _raise(error, f"reading {to.count} rows of {self._spec.name}")


cdef class _Linears:
    """The matrices of a call: PackedLinears of one placement, of whose instruction sets one at most has state. Raises InputError
    for others."""

    cdef list of
    cdef size_t count, last, missing
    cdef kt_outcome outcome
    cdef kt_experts *experts[KT_LINEARS_MAX]

    def __cinit__(self, linears):
        cdef _PackedExperts own
        cdef const kt_isa *stateful = NULL
        self.of, self.count = list(linears), len(linears)
        if not 1 <= self.count <= KT_LINEARS_MAX:
            raise InputError(f"a call has 1 to {KT_LINEARS_MAX} matrices, found {self.count}")
        for i, linear in enumerate(self.of):
            if not isinstance(linear, PackedLinear):
                raise InputError(f"expected PackedLinears, found {type(linear).__name__}")
            own = linear
            self.experts[i] = &own.experts
            if own._domains != (<_PackedExperts>self.of[0])._domains:
                raise InputError(
                    f"{own._spec.name}: matrices of a call must lie on the same NUMA nodes, found it on {len(own._domains)} and "
                    f"{self.name(0)} on {len((<_PackedExperts>self.of[0])._domains)}"
                )
            if own.experts.layer.isa.enter != NULL:
                if stateful != NULL and own.experts.layer.isa != stateful:
                    raise InputError(f"{own._spec.name}: of the instruction sets of a call's matrices only one may have state")
                stateful = own.experts.layer.isa

    cdef str name(self, size_t i):
        cdef _PackedExperts own = self.of[i]
        return own._spec.name

    cdef bint whole(self) noexcept nogil:
        """Whether all can be computed; end() says why not. With the pool's lock held, and until it is let go."""
        self.outcome, self.missing = KT_DONE, 0
        for self.last in range(self.count):
            if not self.experts[self.last].layer.shards:
                self.outcome = KT_CLOSED
            elif not kt_experts_intact(self.experts[self.last]):
                self.outcome = KT_FILE_CHANGED
            self.missing = self.experts[self.last].missing
            if self.outcome != KT_DONE or self.missing:
                return False
        return True

    cdef int end(self, int error, str doing) except -1:
        """Raise what whole() found, or what error is."""
        cdef _PackedExperts own = self.of[self.last]
        own._check_outcome(self.outcome)
        own._check_whole(False, self.missing)
        if error:
            _raise(error, doing)
        return 0


cdef class _Rows:
    """An array of numbers, [tokens, columns], whose rows may be apart. It is held, so that nobody resizes it meanwhile.

    Raises InputError for another dtype, for rows with gaps within, and for one that is to be written and must not be.
    """

    cdef Py_buffer view
    cdef bint held
    cdef kt_dtype dtype
    cdef size_t tokens, columns, stride  # stride: numbers from row to row

    def __cinit__(self, str name, array, bint written=False):
        cdef Py_buffer *v = &self.view
        try:
            PyObject_GetBuffer(array, v, PyBUF_FORMAT | PyBUF_STRIDES | (PyBUF_WRITABLE if written else 0))
        except (TypeError, ValueError, BufferError) as error:
            raise InputError(f"{name} must be an array{' that may be written' if written else ''}: {error}") from None
        self.held = True
        kind = v.format.decode().lstrip("=@<^")
        if kind not in ("H", "f"):
            raise InputError(f"{name} must be uint16 (bf16 bits) or float32, found items of format {kind!r}")
        self.dtype = KT_F32 if kind == "f" else KT_BF16
        if v.ndim != 2:
            raise InputError(f"{name} must be [tokens, any], found {v.ndim} dimensions")
        self.tokens, self.columns = v.shape[0], v.shape[1]
        self.stride = self.columns
        # strides of a single row or number say nothing, nor do those of no tokens
        gaps = self.tokens and self.columns > 1 and v.strides[1] != v.itemsize
        if self.tokens > 1:
            gaps = gaps or v.strides[0] < <Py_ssize_t>self.columns * v.itemsize or v.strides[0] % v.itemsize
            self.stride = v.strides[0] // v.itemsize
        if gaps:
            raise InputError(
                f"{name} must be rows of neighbours, found {[self.tokens, self.columns]}, strides {[v.strides[0], v.strides[1]]}"
            )
        _expect_aligned(name, v.buf, v.itemsize)

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.view)

    cdef int expect(self, str name, size_t tokens, size_t columns, kt_dtype dtype) except -1:
        """Raise InputError unless it has these sizes and numbers."""
        if self.tokens != tokens or self.columns != columns or self.dtype != dtype:
            raise InputError(
                f"{name} must be {'float32' if dtype == KT_F32 else 'uint16'} {[tokens, columns]}, found "
                f"{'float32' if self.dtype == KT_F32 else 'uint16'} {[self.tokens, self.columns]}"
            )
        return 0


def linear_forward(linears, x, columns, outs):
    """The products of several PackedLinears, by one dispatch of the pool.

    x: uint16 (bf16 bits) or float32 [tokens, any]. columns: of each matrix, the first column of x that it takes. outs: of
    each one, where y goes, [tokens, n]; all of x's dtype or all float32. Of rows only the columns must be neighbours. No out overlaps x or another one.
    Raises InputError, ClosedError, CacheError.
    """
    cdef kt_linears call
    cdef kt_experts *experts
    cdef _Rows of_x = _Rows("x", x), out
    cdef size_t i, column
    cdef int error = 0
    cdef _Linears matrices = _Linears(linears)
    memset(&call, 0, sizeof(call))
    if len(columns) != matrices.count or len(outs) != matrices.count:
        raise InputError(f"a call has a column and an out for each of its {matrices.count} matrices")
    call.tokens, call.count, call.dtype = of_x.tokens, matrices.count, of_x.dtype
    call.x, call.stride = of_x.view.buf, of_x.stride
    held = []
    for i in range(matrices.count):
        column, experts = columns[i], matrices.experts[i]
        if column > of_x.columns or of_x.columns - column < experts.layer.hidden:
            raise InputError(
                f"{matrices.name(i)}: x must have {experts.layer.hidden} columns from {column} on, found {of_x.columns} in all"
            )
        out = _Rows("out", outs[i], written=True)
        held.append(out)
        if not i:
            call.y_dtype = out.dtype
        out.expect(f"{matrices.name(i)}: out", of_x.tokens, experts.intermediate, call.y_dtype)
        call.of[i] = kt_linear(&experts.layer, column, out.view.buf, out.stride)
    if call.y_dtype == KT_BF16 and call.dtype == KT_F32:
        raise InputError("out must be of x's dtype or float32, found uint16 for an x of float32")
    with nogil:
        kt_pool_lock()
        if matrices.whole() and call.tokens:
            error = kt_linear_forward(&call)
        kt_pool_unlock()
    matrices.end(error, f"forward of {call.tokens} tokens")


def linear_backward(linears, grads, outs):
    """The gradients of what several PackedLinears take: grad_y W of each, or the sum of these, in their order.

    grads: of each matrix, the gradient of its y, uint16 (bf16 bits) or float32 [tokens, n], all of one dtype. outs: where
    grad_x of each one goes, [tokens, k], or that of all: one array. All of them have one dtype, that of grads or float32.
    Of rows only the columns must be neighbours.
    Raises UnavailableError, which says why a matrix has no gradient; InputError, ClosedError, CacheError.
    """
    cdef kt_linear_gradients call
    cdef kt_experts *experts
    cdef _Rows grad, out
    cdef size_t i, results = len(outs)
    cdef int error = 0
    cdef _Linears matrices = _Linears(linears)
    memset(&call, 0, sizeof(call))
    if len(grads) != matrices.count or results not in (1, matrices.count):
        raise InputError(f"a call has a gradient for each of its {matrices.count} matrices, and one out or as many")
    for i in range(matrices.count):
        reason = _untrainable(matrices.of[i], False)
        if reason:
            raise UnavailableError(f"{matrices.name(i)}: it cannot be trained: {reason}")
    call.inputs = matrices.experts[0].layer.hidden
    call.count, call.summed = matrices.count, results == 1
    held = []
    for i in range(matrices.count):
        grad, experts = _Rows("grads", grads[i]), matrices.experts[i]
        held.append(grad)
        if not i:
            call.tokens, call.dtype = grad.tokens, grad.dtype
        grad.expect(f"{matrices.name(i)}: grads", call.tokens, experts.intermediate, call.dtype)
        if experts.layer.hidden != call.inputs:
            raise InputError(f"{matrices.name(i)}: expected {call.inputs} inputs, found {experts.layer.hidden}")
        call.of[i].layer, call.of[i].grad_y, call.of[i].stride = &experts.layer, grad.view.buf, grad.stride
    for i in range(results):
        out = _Rows("out", outs[i], written=True)
        held.append(out)
        if not i:
            call.x_dtype = out.dtype
        out.expect("out", call.tokens, call.inputs, call.x_dtype)
        call.of[i].grad_x, call.of[i].x_stride = out.view.buf, out.stride
    if call.x_dtype == KT_BF16 and call.dtype == KT_F32:
        raise InputError("out must be of the gradients' dtype or float32, found uint16 for gradients of float32")
    with nogil:
        kt_pool_lock()
        if matrices.whole() and call.tokens:
            error = kt_linear_backward(&call)
        kt_pool_unlock()
    matrices.end(error, f"backward of {call.tokens} tokens")
