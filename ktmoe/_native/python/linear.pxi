# Packed dense matrices: each is the only matrix of one expert. Several are computed in one call.

#: Matrices of a call.
LINEARS_MAX = KT_LINEARS_MAX


cdef class PackedLinear(_PackedExperts):
    """A packed dense matrix. Made as _PackedExperts is, of LinearWeights."""

    def forward(self, x, out):
        """y into out. x: uint16 (bf16 bits) or float32 [tokens, k], C-contiguous. out: of x's dtype or float32, [tokens, n]."""
        linear_forward((self,), x, (0,), (out,))


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
    if (columns > 1 and number != array.itemsize) or (tokens > 1 and (row < columns * array.itemsize or row % array.itemsize)):
        raise InputError(f"{name} must be rows of neighbours, found {list(array.shape)}, strides {array.strides}")
    return dtype, row // array.itemsize if tokens > 1 else columns


def linear_forward(linears, x, columns, outs):
    """The products of several PackedLinears, by one dispatch of the pool.

    x: uint16 (bf16 bits) or float32 [tokens, any]. columns: of each matrix, the first column of x that it takes. outs: of
    each one, where y goes, [tokens, n]; all of x's dtype or all float32. Of rows only the columns must be neighbours.
    Raises InputError, ClosedError, CacheError.
    """
    cdef kt_linears call
    cdef _PackedExperts own
    cdef kt_outcome outcome = KT_DONE
    cdef size_t i, missing = 0
    cdef int error = 0
    cdef size_t count = len(linears)
    cdef const kt_isa *stateful = NULL
    cdef kt_experts *experts[KT_LINEARS_MAX]
    memset(&call, 0, sizeof(call))
    if not 1 <= count <= KT_LINEARS_MAX or len(columns) != count or len(outs) != count:
        raise InputError(f"a call has 1 to {KT_LINEARS_MAX} matrices, a column and an out for each, found {count}")
    call.dtype, call.stride = _rows_of("x", x)
    call.y_dtype = _rows_of("out", outs[0])[0]
    if call.y_dtype == KT_BF16 and call.dtype == KT_F32:
        raise InputError("out must be of x's dtype or float32, found uint16 for an x of float32")
    call.tokens, call.count = x.shape[0], count
    call.x = <const void *><size_t>x.ctypes.data
    _expect_aligned("x", call.x, x.itemsize)
    for i, linear in enumerate(linears):
        own, out, column = linear, outs[i], operator.index(columns[i])
        if not isinstance(linear, PackedLinear):
            raise InputError(f"expected PackedLinears, found {type(linear).__name__}")
        dtype, call.of[i].stride = _rows_of("out", out)
        if dtype != call.y_dtype or not out.flags.writeable:
            raise InputError("outs must be of one dtype and writeable")
        if out.shape != (x.shape[0], own.experts.intermediate) or not 0 <= column <= x.shape[1] - <object>own.experts.layer.hidden:
            raise InputError(
                f"{own._spec.name}: x and out must be [tokens, {own.experts.layer.hidden} from column {column} on] and [tokens, "
                f"{own.experts.intermediate}], found {list(x.shape)} and {list(out.shape)}"
            )
        if own.experts.layer.placement != (<_PackedExperts>linears[0]).experts.layer.placement:
            raise InputError(f"{own._spec.name}: matrices of a call must have one placement")
        if own.experts.layer.isa.enter != NULL:
            if stateful != NULL and own.experts.layer.isa != stateful:
                raise InputError(f"{own._spec.name}: of the instruction sets of a call's matrices only one may have state")
            stateful = own.experts.layer.isa
        call.of[i].layer, call.of[i].column = &own.experts.layer, column
        call.of[i].y = <void *><size_t>out.ctypes.data
        _expect_aligned("out", call.of[i].y, out.itemsize)
        experts[i] = &own.experts
    if not call.tokens:
        return
    with nogil:
        kt_pool_lock()
        for i in range(count):
            if not experts[i].layer.shards:
                outcome = KT_CLOSED
            elif not kt_experts_intact(experts[i]):
                outcome = KT_FILE_CHANGED
            missing += experts[i].missing
            if outcome != KT_DONE or missing:
                break
        else:
            error = kt_linear_forward(&call)
        kt_pool_unlock()
    own = linears[min(i, count - 1)]
    own._check_outcome(outcome)
    own._check_whole(False, missing)
    if error:
        _raise(error, f"forward of {call.tokens} tokens")
