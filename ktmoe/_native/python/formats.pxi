# What a format is to the driver: values in the forms that kernels look up, and how codes, scales and zero points are packed.

cdef tuple packed_scale(weight_format):
    """(kind, k that share one) of the scales in a packed panel; ("none", 0) without.

    Scales that are shared by the columns of whole panels are packed as float32, which all kinds are exactly: "panel".
    Raises FormatError, which names the component, for what no panel can have.
    """
    scale, super_scale, offset = weight_format.scale, weight_format.super_scale, weight_format.offset
    minima = isinstance(offset, Minimum)
    offsets = "minima" if minima else "zero points"
    if weight_format.order.packed:  # records as they stand
        return scale.kind, scale.extent[1]
    if scale is None:
        if offset:
            raise FormatError(f"no kernel has {offsets} without scales")
        return "none", 0
    if super_scale and super_scale.extent != (1, KT_SUPER_GROUP):
        raise FormatError(f"no kernel has {super_scale.description} that multiply scales, only per 1x{KT_SUPER_GROUP}")
    rows, columns = scale.extent
    alone = columns == KT_SUPER_GROUP and scale == Scale("fp16", (1, columns)) and not super_scale and not offset
    if columns not in (KT_SCALE_GROUP_MIN, 32, 64, KT_SCALE_GROUP_MAX) and not alone:
        raise FormatError(f"no kernel has scale groups of {columns}, only of 16, 32, 64 and {KT_SCALE_GROUP_MAX} along k, "
                          f"or fp16 ones of {KT_SUPER_GROUP} alone")
    if SCALE_KINDS[scale.kind].packed_bits and (scale.extent != (1, KT_SCALE_GROUP_MIN) or not super_scale):
        raise FormatError(f"no kernel has {scale.description}, only {scale.kind} scales per 1x{KT_SCALE_GROUP_MIN} with super-scales")
    if minima and scale.kind == "int6":
        raise FormatError("no kernel has minima beside int6 scales")
    if minima and (offset.scale, offset.super_scale) != (scale, super_scale):
        raise FormatError("no kernel has minima that are stored in another way than the scales")
    if offset and not minima and offset.extent != scale.extent:
        raise FormatError("no kernel has zero points for other groups than the scales'")
    if rows == 1:
        return scale.kind, columns
    if rows % KT_PANEL or offset or super_scale:
        beside = " and ".join(name for name, there in ((offsets, offset), ("super-scales", super_scale)) if there)
        raise FormatError(f"no kernel has {f'{beside} with ' if beside else ''}scales shared by {rows} rows, "
                          f"only by 1 row or by multiples of {KT_PANEL}")
    return "panel", columns


cdef _fill_codebook(kt_codebook *book, weight_format):
    cdef int i
    cdef uint16_t sign, magnitude
    memset(book, 0, sizeof(kt_codebook))
    values = weight_format.element.values
    if weight_format.element.family == "int":
        book.zero = 128 if len(values) == 256 else -int(values[0])
        for i in range(64 if len(values) <= 64 else 0):
            book.plain[i] = np.float32(values[i % len(values)]).view(np.uint32) >> 16
    if weight_format.element.family != "q4":
        return
    book.grid = _grid_of(weight_format)
    values = np.asarray(weight_format.element.values, np.float32)
    bits = values.view(np.uint32) >> 16
    signed5 = np.array([*range(16), *range(-16, 0)], np.float32).view(np.uint32) >> 16
    book.unit = folding.unit(weight_format.element.values, 127)
    for i in range(32):
        book.plain[i] = bits[i % 16]
        book.signed5[i] = signed5[i]
        sign, magnitude = bits[i % 16] & 0x8000, bits[i % 16] & 0x7FFF
        book.folded[i] = sign | (magnitude + (126 << 7)) if magnitude else 0
        book.value[i % 16] = values[i % 16]
        book.whole[i % 16] = int(values[i % 16] / book.unit) if book.unit else 0


cdef bint _packs(const kt_packing *packing, weight_format):
    return packing.family.decode() == weight_format.family and packing.bits in (0, weight_format.element.bits)


cdef _fill_format(kt_format *packed, weight_format):
    cdef const kt_packing *const *packing = kt_packings
    memset(packed, 0, sizeof(kt_format))
    while packing[0] != NULL and not _packs(packing[0], weight_format):
        packing += 1
    packed.packing = packing[0]
    if packed.packing == NULL:
        raise FormatError(f"weights of family {weight_format.family!r} cannot be packed")
    packed.padding = weight_format.element.padding
    order = weight_format.order
    if order.packed:
        packed.grid = _grid_of(weight_format)
        return
    if type(order) is Records:
        packed.order.moved = True
        _fill_records(&packed.order.records, weight_format)
    elif type(order) is Order and not order.rows:
        packed.order.moved, packed.order.along_n, packed.order.transposed = True, order.along == "n", order.transposed
        packed.order.code_bytes = weight_format.element.row_bits // 8
        for i, code in enumerate(order.nibbles):
            packed.order.nibbles[i] = code
    try:
        kind, columns = packed_scale(weight_format)
    except FormatError as error:
        raise FormatError(f"{weight_format.description}: {error}") from None
    for i, (label, how) in enumerate(_group_arrays(weight_format)):
        if isinstance(how, ZeroPoint):
            packed.groups[i].group, packed.groups[i].rows, packed.groups[i].bytes = columns, 1, 1
        elif how:
            of = SCALE_KINDS["fp32" if kind == "panel" else how.kind]
            rows, group = how.extent
            negated = label == _added(weight_format)
            packed.groups[i] = kt_group_array(group, rows, of.dtype.itemsize, 0, of.magnitude, of.field, negated, of.packed_bits,
                                              -of.least)
            if label in ("scales", "super_scales"):
                packed.groups[i].padding = of.one


cdef tuple _group_arrays(weight_format):
    """((name of an array, what says how it is stored, or None), ...) of a format's arrays of groups, as kt_format has them.

    None of records that are packed as they stand."""
    if weight_format.order.packed:
        return ()
    if weight_format.scale and weight_format.scale.extent == (1, KT_SUPER_GROUP):  # they are packed as super-scales are
        return ("scales", None), ("scales", weight_format.scale), ("offsets", None), ("super_offsets", None)
    offset = weight_format.offset
    minima = offset if isinstance(offset, Minimum) else None
    return (
        ("scales", weight_format.scale),
        ("super_scales", weight_format.super_scale),
        ("offsets", minima.scale if minima else offset),
        ("super_offsets", minima.super_scale if minima else None),
    )


cdef str _added(weight_format):
    """The array that is packed with the other sign, where minima are added: kernels subtract them. "" where none is."""
    if not isinstance(weight_format.offset, Minimum) or not weight_format.offset.added:
        return ""
    return "super_offsets" if weight_format.offset.super_scale else "offsets"


cdef bint _by_python(weight_format):
    """Whether Python turns matrices of this order into rows, since C has it not. C has no subclass: it may override anything."""
    return type(weight_format.order) not in (Order, Records, GridRecords, TernaryRecords)


cdef dict staged(matrix, bint filled):
    """A Matrix's arrays of groups as packing takes them: by row, along k; float32 where whole panels share a scale; the codes, too,
    where C has not their order. filled: they stand in records: arrays that packing fills."""
    weight_format = matrix.format
    if matrix.format.order.packed:
        return {}
    if filled:
        return {label: np.empty(scale.shape(*matrix.shape), scale.dtype) for label, scale in weight_format.scales.items()}
    if _by_python(weight_format):
        arrays = weight_format.rows(matrix.stored, *matrix.shape)
    else:
        arrays = weight_format.group_rows(matrix.stored)
    if isinstance(weight_format.offset, ZeroPoint):
        if arrays["offsets"].max() > 15:
            matrix.refuse()
        arrays["offsets"] = weight_format.offset.numbers(arrays["offsets"])
    if weight_format.scale and weight_format.scale.extent[0] > 1:
        arrays["scales"] = weight_format.scale.numbers(arrays["scales"]).astype(np.float32)
    return arrays


cdef dict unstaged(weight_format, arrays, n, k):
    """The inverse: those arrays, by name, as the checkpoint has them. None of records, which unpacking has filled."""
    arrays = dict(arrays)
    if weight_format.scale and weight_format.scale.extent[0] > 1:
        arrays["scales"] = weight_format.scale.stored(arrays["scales"])
    if isinstance(weight_format.offset, ZeroPoint):
        arrays["offsets"] = weight_format.offset.stored(arrays["offsets"])
    if _by_python(weight_format):
        return dataclasses.replace(weight_format, factor=None).from_rows(arrays, n, k)
    return weight_format.stored_groups(arrays)


cdef object _bytes(str name, array, size_t nbytes):
    """An array as uint8 [nbytes]. It may have been resized since it was checked."""
    if not array.flags.aligned:
        raise FormatError(f"{name}: expected an array that is aligned to its items, found one that is not")
    view = np.asarray(array).reshape(-1).view(np.uint8)
    if <size_t>view.size != nbytes:
        raise FormatError(f"{name}: expected {nbytes} bytes, found {view.size}; the array was changed after it was checked")
    return view


def expert_nbytes(experts, ranges):
    """Bytes of one of these experts, or of a dense matrix, packed, in all shards. ranges: each shard's columns of h, or rows,
    [(first, last)]."""
    cdef kt_format formats[3]
    cdef kt_shard_memory shard
    for p, projection in enumerate(experts.projections):
        _fill_format(&formats[p], experts.formats[projection])
    total = 0  # Python's integers do not wrap
    for first, last in ranges:
        shard.first, shard.count = first, last - first
        total += <object>kt_expert_bytes(formats, len(experts.projections), experts.hidden, &shard)
    return total
