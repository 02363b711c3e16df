# Packed dense matrices: each is the only matrix of one expert. Several are computed in one call.

#: Matrices of a call.
LINEARS_MAX = KT_LINEARS_MAX


cdef class PackedLinear(_PackedExperts):
    """A packed dense matrix. Made as _PackedExperts is, of LinearWeights."""

    def forward(self, x, out):
        """y into out. x: uint16 (bf16 bits) or float32 [tokens, k], C-contiguous. out: of x's dtype or float32, [tokens, n]."""
        linear_forward((self,), x, (0,), (out,))

    def backward(self, grad_y, grad_x):
        """grad_y W into grad_x. grad_y: uint16 (bf16 bits) or float32 [tokens, n]. grad_x: of its dtype or float32, [tokens, k]."""
        linear_backward((self,), (grad_y,), (grad_x,))


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
            if own.experts.layer.placement != self.experts[0].layer.placement:
                raise InputError(f"{own._spec.name}: matrices of a call must have one placement")
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


cdef (kt_dtype, size_t) _rows_of(str name, array) except *:
    """What the numbers of an array's rows are, and how many are from row to row. Raises InputError for another dtype, and for rows
    with gaps within."""
    cdef kt_dtype dtype = KT_F32 if array.dtype == np.float32 else KT_BF16
    if dtype == KT_BF16 and array.dtype != np.uint16:
        raise InputError(f"{name} must be uint16 (bf16 bits) or float32, found {array.dtype}")
    if array.ndim != 2:
        raise InputError(f"{name} must be [tokens, any], found {list(array.shape)}")
    tokens, columns = array.shape
    row, number = array.strides  # of a single row or number they say nothing
    if (tokens and columns > 1 and number != array.itemsize) or (tokens > 1 and (row < columns * array.itemsize or row % array.itemsize)):
        raise InputError(f"{name} must be rows of neighbours, found {list(array.shape)}, strides {array.strides}")
    return dtype, row // array.itemsize if tokens > 1 else columns


cdef size_t _rows_to_write(str name, array, kt_dtype dtype) except *:
    """How many numbers are from row to row of an array that may be written. Raises InputError for another dtype, and others."""
    found, stride = _rows_of(name, array)
    if found != dtype or not array.flags.writeable:
        raise InputError(f"{name} must be of one dtype and writeable")
    _expect_aligned(name, <const void *><size_t>array.ctypes.data, array.itemsize)
    return stride


def linear_forward(linears, x, columns, outs):
    """The products of several PackedLinears, by one dispatch of the pool.

    x: uint16 (bf16 bits) or float32 [tokens, any]. columns: of each matrix, the first column of x that it takes. outs: of
    each one, where y goes, [tokens, n]; all of x's dtype or all float32. Of rows only the columns must be neighbours.
    Raises InputError, ClosedError, CacheError.
    """
    cdef kt_linears call
    cdef kt_experts *experts
    cdef size_t i
    cdef int error = 0
    cdef _Linears matrices = _Linears(linears)
    memset(&call, 0, sizeof(call))
    if len(columns) != matrices.count or len(outs) != matrices.count:
        raise InputError(f"a call has a column and an out for each of its {matrices.count} matrices")
    call.dtype, call.stride = _rows_of("x", x)
    call.y_dtype = _rows_of("out", outs[0])[0]
    if call.y_dtype == KT_BF16 and call.dtype == KT_F32:
        raise InputError("out must be of x's dtype or float32, found uint16 for an x of float32")
    call.tokens, call.count = x.shape[0], matrices.count
    call.x = <const void *><size_t>x.ctypes.data
    _expect_aligned("x", call.x, x.itemsize)
    for i in range(matrices.count):
        out, column, experts = outs[i], operator.index(columns[i]), matrices.experts[i]
        call.of[i].stride = _rows_to_write("outs", out, call.y_dtype)
        if out.shape != (x.shape[0], experts.intermediate) or not 0 <= column <= x.shape[1] - <object>experts.layer.hidden:
            raise InputError(
                f"{matrices.name(i)}: x and out must be [tokens, {experts.layer.hidden} from column {column} on] and [tokens, "
                f"{experts.intermediate}], found {list(x.shape)} and {list(out.shape)}"
            )
        call.of[i].layer, call.of[i].column = &experts.layer, column
        call.of[i].y = <void *><size_t>out.ctypes.data
    if not call.tokens:
        return
    with nogil:
        kt_pool_lock()
        if matrices.whole():
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
    cdef kt_dtype dtype
    cdef size_t i, results = len(outs)
    cdef int error = 0
    cdef _Linears matrices = _Linears(linears)
    memset(&call, 0, sizeof(call))
    if len(grads) != matrices.count or results not in (1, matrices.count):
        raise InputError(f"a call has a gradient for each of its {matrices.count} matrices, and one out or as many")
    for i in range(matrices.count):
        reason = _untrainable(matrices.of[i])
        if reason:
            raise UnavailableError(f"{matrices.name(i)}: it cannot be trained: {reason}")
    call.dtype = _rows_of("grads", grads[0])[0]
    call.x_dtype = _rows_of("out", outs[0])[0]
    if call.x_dtype == KT_BF16 and call.dtype == KT_F32:
        raise InputError("out must be of the gradients' dtype or float32, found uint16 for gradients of float32")
    call.tokens, call.inputs = grads[0].shape[0], matrices.experts[0].layer.hidden
    call.count, call.summed = matrices.count, results == 1
    for i in range(matrices.count):
        grad, experts = grads[i], matrices.experts[i]
        dtype, call.of[i].stride = _rows_of("grads", grad)
        if dtype != call.dtype:
            raise InputError("grads must be of one dtype")
        if grad.shape != (call.tokens, experts.intermediate) or experts.layer.hidden != call.inputs:
            raise InputError(
                f"{matrices.name(i)}: expected a gradient [{call.tokens}, {experts.intermediate}] and {call.inputs} inputs, "
                f"found {list(grad.shape)} and {experts.layer.hidden}"
            )
        call.of[i].layer, call.of[i].grad_y = &experts.layer, <const void *><size_t>grad.ctypes.data
        _expect_aligned("grads", call.of[i].grad_y, grad.itemsize)
    for i in range(results):
        out = outs[i]
        call.of[i].x_stride = _rows_to_write("outs", out, call.x_dtype)
        if out.shape != (call.tokens, call.inputs):
            raise InputError(f"out must be {[call.tokens, call.inputs]}, found {list(out.shape)}")
        call.of[i].grad_x = <void *><size_t>out.ctypes.data
    if not call.tokens:
        return
    with nogil:
        kt_pool_lock()
        if matrices.whole():
            error = kt_linear_backward(&call)
        kt_pool_unlock()
    matrices.end(error, f"backward of {call.tokens} tokens")
