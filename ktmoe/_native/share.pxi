# What a format is to the driver, and what one shard has of a matrix.

cdef void _fill_codebook(kt_codebook *book, weight_format):
    cdef int i
    cdef uint16_t sign, magnitude
    memset(book, 0, sizeof(kt_codebook))
    if not weight_format.codebook:
        return
    values = np.asarray(weight_format.codebook, np.float32)
    bits = values.view(np.uint32) >> 16
    book.unit = codebook.unit(weight_format.codebook)
    for i in range(32):
        book.plain[i] = bits[i % 16]
        sign, magnitude = bits[i % 16] & 0x8000, bits[i % 16] & 0x7FFF
        book.folded[i] = sign | (magnitude + (126 << 7)) if magnitude else 0
        book.value[i % 16] = values[i % 16]
        book.whole[i % 16] = int(values[i % 16] / book.unit) if book.unit else 0


cdef _fill_layout(kt_format *layout, weight_format):
    memset(layout, 0, sizeof(kt_format))
    layout.packing = kt_packing_of(weight_format.family.encode())
    if not layout.packing:
        raise FormatError(f"weights of family {weight_format.family!r} cannot be packed")
    scale = weight_format.scale
    if scale is None:
        return
    rows, group = scale.extent
    if rows != 1 or group % KT_GROUP or group & (group - 1):
        raise FormatError(f"{weight_format.description}: packed scales must be per 1x{KT_GROUP} times a power of two")
    layout.group = group
    layout.scale_bytes = scale.dtype.itemsize
    layout.scale_one = {"ue8m0": 127, "bf16": 0x3F80}[scale.kind]
    layout.zero_code = weight_format.codebook.index(0.0)


cdef kt_share _share(int projection, const kt_format *layout, size_t first, size_t last, size_t hidden) noexcept:
    """Columns [first, last) of h: so many rows of gate and up, and columns of down."""
    cdef kt_share share
    memset(&share, 0, sizeof(share))
    share.format = layout
    if projection == 2:
        share.n, share.k, share.column = hidden, last - first, first
    else:
        share.n, share.k, share.row = last - first, hidden, first
    return share


cdef size_t _codes_bytes(const kt_format *f, size_t k) noexcept:
    """Of a row of k columns."""
    return k * f.packing.code_bits // 8


cdef size_t _scales_bytes(const kt_format *f, size_t k) noexcept:
    """Of a row of k columns; f has scales."""
    return (k + f.group - 1) // f.group * f.scale_bytes


cdef object _bytes(str name, array, size_t nbytes):
    """An array as uint8 [nbytes]. It may have been resized since it was checked."""
    view = np.asarray(array).reshape(-1).view(np.uint8)
    if <size_t>view.size != nbytes:
        raise FormatError(f"{name}: expected {nbytes} bytes, found {view.size}; the array was changed after it was checked")
    return view


cdef void _point(kt_share *share, const uint8_t *codes, const uint8_t *scales, size_t k) noexcept:
    """At its part of a whole matrix of k columns, in the checkpoint's own bytes."""
    cdef const kt_format *f = share.format
    cdef kt_source *s = &share.source
    s.format, s.n, s.k = f, share.n, share.k
    s.codes_stride_bytes = _codes_bytes(f, k)
    s.codes = &codes[share.row * s.codes_stride_bytes + _codes_bytes(f, share.column)]
    if f.group:
        s.scales_stride_bytes = _scales_bytes(f, k)
        s.scales = &scales[share.row * s.scales_stride_bytes + share.column // f.group * f.scale_bytes]


cdef list _fill_piece(kt_piece *piece, int projection, const kt_format *f, arrays, size_t first, size_t count, size_t hidden):
    """Columns [first, first + count) of h, as _share() has them, into (codes, scales or None); the memoryviews of these."""
    cdef uint8_t[::1] codes, scales
    piece.matrix = projection
    if projection == 2:
        piece.rows, piece.column, piece.columns = hidden, first, count
    else:
        piece.row, piece.rows, piece.columns = first, count, hidden
    codes = _bytes(f"{PROJECTIONS[projection]} codes", arrays[0], piece.rows * _codes_bytes(f, piece.columns))
    piece.codes = &codes[0]
    if not f.group:
        return [codes]
    scales = _bytes(f"{PROJECTIONS[projection]} scales", arrays[1], piece.rows * _scales_bytes(f, piece.columns))
    piece.scales = &scales[0]
    return [codes, scales]


def expert_nbytes(experts, spans):
    """Bytes of one of these ExpertWeights' experts, packed, in all shards."""
    cdef kt_format layouts[3]
    cdef size_t offsets[3]
    cdef size_t total = 0
    for p, projection in enumerate(PROJECTIONS):
        _fill_layout(&layouts[p], experts.formats[projection])
    for first, last in spans:
        total += _lay_out_expert(layouts, first, last, experts.hidden, offsets)
    return total


cdef size_t _lay_out_expert(const kt_format *layouts, size_t first, size_t last, size_t hidden, size_t *offsets) noexcept:
    """Where a shard's three matrices of an expert begin; the bytes of all."""
    cdef size_t at = 0
    cdef kt_share share
    cdef int p
    for p in range(3):
        share = _share(p, &layouts[p], first, last, hidden)
        offsets[p] = at
        at += (share.n + KT_PANEL - 1) // KT_PANEL * share.format.packing.panel_bytes(share.format, share.k)
    return at


cdef const float *_shard_bias(matrix, const kt_share *share, size_t n) except? NULL:
    """A copy, padded to whole panels, of what is added to this share's outputs; NULL if nothing is. free() gives it back.

    n: rows of the matrix.
    """
    cdef const float[::1] bias
    cdef float *copy
    given = matrix.bias
    if given is None:
        return NULL
    bias = _bytes(f"{matrix.name} bias", given, n * sizeof(float)).view(np.float32)
    if not np.isfinite(bias).all():
        matrix.refuse()
    if share.column:
        return NULL  # down's belongs to the first shard
    copy = <float *>calloc((share.n + KT_PANEL - 1) // KT_PANEL * KT_PANEL, sizeof(float))
    if not copy:
        raise OutOfMemoryError(f"{matrix.name}: the system refused memory for its bias")
    memcpy(copy, &bias[share.row], share.n * sizeof(float))
    return copy


cdef bint _copy_bias(const kt_share *share, const float *bias, float *whole) noexcept nogil:
    """The inverse of _shard_bias(); False if there is none."""
    if bias:
        memcpy(whole + share.row, bias, share.n * sizeof(float))
    return bias != NULL
