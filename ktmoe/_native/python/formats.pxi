# What a format is to the driver: a codebook in the forms that kernels look up, and how codes and scales are packed.

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


cdef _fill_format(kt_format *packed, weight_format):
    memset(packed, 0, sizeof(kt_format))
    packed.packing = kt_packing_of(weight_format.family.encode())
    if not packed.packing:
        raise FormatError(f"weights of family {weight_format.family!r} cannot be packed")
    scale = weight_format.scale
    if scale is None:
        return
    rows, columns = scale.extent
    if rows != 1 or columns % KT_BLOCK or columns & (columns - 1):
        raise FormatError(f"{weight_format.description}: packed scales must be per 1x{KT_BLOCK} times a power of two")
    packed.scale_group = columns
    packed.scale_bytes = scale.dtype.itemsize
    packed.scale_one = {"ue8m0": 127, "bf16": 0x3F80}[scale.kind]
    packed.zero_code = weight_format.codebook.index(0.0)


cdef object _bytes(str name, array, size_t nbytes):
    """An array as uint8 [nbytes]. It may have been resized since it was checked."""
    view = np.asarray(array).reshape(-1).view(np.uint8)
    if <size_t>view.size != nbytes:
        raise FormatError(f"{name}: expected {nbytes} bytes, found {view.size}; the array was changed after it was checked")
    return view


def expert_nbytes(experts, ranges):
    """Bytes of one of these ExpertWeights' experts, packed, in all shards. ranges: each shard's columns of h, [(first, last)]."""
    cdef kt_format formats[3]
    cdef kt_shard_memory shard
    cdef size_t total = 0
    for p, projection in enumerate(PROJECTIONS):
        _fill_format(&formats[p], experts.formats[projection])
    for first, last in ranges:
        shard.first, shard.count = first, last - first
        total += kt_expert_bytes(formats, experts.hidden, &shard)
    return total
