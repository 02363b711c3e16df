# Rounding weights: the arguments are ktmoe.quantization's Weights and Rounding.

_STORED = {"bf16": (KT_SOURCE_BF16, 4), "fp16": (KT_SOURCE_FP16, 4), "fp32": (KT_SOURCE_FP32, 8), "bytes": (KT_SOURCE_BYTES, 2),
           "nibbles": (KT_SOURCE_NIBBLES, 1)}  # what codes are, and how many halves of a byte
_ROUNDS_TO = {"integers": KT_TO_INTEGERS, "E2M1": KT_TO_E2M1, "E4M3": KT_TO_E4M3}
_TIES = {"even": KT_TIES_EVEN, "away": KT_TIES_AWAY, "zero": KT_TIES_ZERO}


cdef const void *_address(array, dtype, size_t count) except? NULL:
    """The address of a C-contiguous array of so many numbers. Raises FormatError."""
    if array.dtype != dtype or not (array.flags.c_contiguous and array.flags.aligned) or <size_t>array.size != count:
        raise FormatError(f"expected {count} numbers of {np.dtype(dtype)}, found {array.dtype} {list(array.shape)}; "
                          "the array was changed after it was checked")
    cdef size_t address = array.ctypes.data
    return <const void *>address


cdef size_t _groups(size_t n, size_t k, size_t rows, size_t columns):
    return ((n + rows - 1) // rows) * ((k + columns - 1) // columns)


cdef _fill_weights(kt_weights *m, weights):
    """Point at the arrays of weights, which stay the caller's."""
    memset(m, 0, sizeof(kt_weights))
    m.n, m.k = weights.shape
    m.stored, halves = _STORED[weights.stored]
    m.codes = <const uint8_t *>_address(weights.codes.reshape(-1).view(np.uint8), np.uint8, m.n * m.k * <size_t>halves // 2)
    _expect_aligned(weights.name, m.codes, weights.codes.dtype.itemsize)
    m.rows, m.columns = weights.extent
    m.point_columns = weights.point_columns
    if weights.values is not None:
        m.values = <const float *>_address(weights.values, np.float32, 16 if m.stored == KT_SOURCE_NIBBLES else 256)
    if weights.scales is not None:
        m.scales = <const float *>_address(weights.scales, np.float32, _groups(m.n, m.k, m.rows, m.columns))
    if weights.points is not None:
        m.points = <const float *>_address(weights.points, np.float32, _groups(m.n, m.k, 1, m.point_columns))
    if weights.factors is not None:
        m.per_row, m.divides = weights.factors.size > 1, weights.divides
        m.factors = <const float *>_address(weights.factors, np.float32, m.n if m.per_row else 1)


def weights_extremes(weights, rows, columns):
    """(low, high) of each group of rows x columns, float32 [groups along n, groups along k]; None if a weight is not finite."""
    cdef kt_weights m
    cdef size_t group_rows = rows, group_columns = columns
    cdef bint good
    _fill_weights(&m, weights)
    low = np.empty(((m.n + group_rows - 1) // group_rows, (m.k + group_columns - 1) // group_columns), np.float32)
    high = np.empty_like(low)
    cdef size_t low_at = low.ctypes.data, high_at = high.ctypes.data
    with nogil:
        good = kt_weight_extremes(&m, group_rows, group_columns, <float *>low_at, <float *>high_at)
    return (low, high) if good else None


def weights_rounded(weights, rounding, row, rows, codes, bint summed):
    """Round some rows from one on, which begins a group, into codes: uint8 of the whole matrix, in the order of rows.

    Returns the sums of squares of what was added, and of the weights; zeros unless `summed`.
    """
    cdef kt_weights m
    cdef kt_rounding how
    cdef double sums[2]
    sums[0] = sums[1] = 0
    cdef size_t first = row, count = rows
    _fill_weights(&m, weights)
    memset(&how, 0, sizeof(kt_rounding))
    how.to, how.ties = _ROUNDS_TO[rounding.to], _TIES[rounding.ties]
    how.sixteenths, how.float64 = rounding.quotient == "sixteenths", rounding.quotient == "float64"
    how.negative_zero, how.zero_signed = rounding.negative_zero, rounding.zero_signed
    how.rows, how.columns = rounding.extent
    how.least, how.most, how.code_bits, how.plus = rounding.least, rounding.most, rounding.code_bits, rounding.plus
    if first + count > m.n or first % how.rows:
        raise FormatError(f"expected whole groups of {m.n} rows, found {count} rows from row {first} on")
    cdef size_t groups = _groups(count, m.k, how.rows, how.columns)
    if rounding.multipliers is not None:
        how.multipliers = <const float *>_address(rounding.multipliers, np.float32, groups)
    if rounding.points is not None:
        how.points = <const float *>_address(rounding.points, np.float32, groups)
    how.divisors = <const float *>_address(rounding.divisors, np.float32, groups)
    how.values = <const double *>_address(rounding.values, np.float64, groups)
    for i in range(KT_E2M1_LIMITS):
        how.limits[i] = rounding.limits[i]
    cdef uint8_t *to = <uint8_t *>_address(codes, np.uint8, m.n * m.k * how.code_bits // 8)
    with nogil:
        kt_round_weights(&m, &how, first, count, to, sums if summed else NULL)
    return sums[0], sums[1]
