# What a format is to the driver, and what one shard has of a matrix.

PROJECTIONS = ("gate", "up", "down")

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


cdef void _point(kt_share *share, const uint8_t *codes, const uint8_t *scales, size_t k) noexcept:
    """At its part of a whole matrix of k columns, in the checkpoint's own bytes."""
    cdef const kt_format *f = share.format
    cdef kt_source *s = &share.source
    s.format, s.n, s.k = f, share.n, share.k
    s.codes_stride_bytes = k * f.packing.code_bits // 8
    s.codes = &codes[share.row * s.codes_stride_bytes + share.column * f.packing.code_bits // 8]
    if f.group:
        s.scales_stride_bytes = (k + f.group - 1) // f.group * f.scale_bytes
        s.scales = &scales[share.row * s.scales_stride_bytes + share.column // f.group * f.scale_bytes]


cdef int _fill_piece(kt_piece *piece, int projection, arrays, size_t first, size_t count, size_t hidden) except -1:
    """Columns [first, first + count) of h, as _share() has them, into (codes, scales or None)."""
    cdef uint8_t[::1] codes = arrays[0].reshape(-1).view(np.uint8)
    cdef uint8_t[::1] scales
    piece.matrix, piece.codes = projection, &codes[0]
    if arrays[1] is not None:
        scales = arrays[1].reshape(-1).view(np.uint8)
        piece.scales = &scales[0]
    if projection == 2:
        piece.rows, piece.column, piece.columns = hidden, first, count
    else:
        piece.row, piece.rows, piece.columns = first, count, hidden
