# Records that are packed as they stand: their grids, and where in a record indices, signs and scales are.

cdef class _Grid:
    """What kernels know of an order of records that says `packed`, the family that it is packed as."""

    cdef kt_grid grid
    cdef object _entries  # that grid points to

    def __cinit__(self, order):
        cdef const uint16_t[::1] entries
        cdef kt_grid *to = &self.grid
        if order.weights != KT_SUPER_GROUP:
            raise FormatError(f"{order.name} records have {order.weights} weights; the packed layout takes {KT_SUPER_GROUP}")
        to.record_bytes = order.nbytes
        supers = order.scales if order.packed == "ternary" else order.super_scales
        _fill_bytes(to.super, 1, f"{order.name} records: fp16 scale", supers, 0)
        _fill_bytes(to.super + 1, 1, f"{order.name} records: fp16 scale", supers, 1)
        if order.packed == "ternary":
            if order.runs != ((0, 32, 5), (32, 16, 5), (48, 4, 4)):
                raise FormatError(f"no kernel has {order.name} records, whose digits stand in runs of {order.runs}")
            return
        grid = order.grid
        self._entries = np.ascontiguousarray(order.entry_words(), np.uint16)
        entries = self._entries
        to.entries, to.count, to.weights = &entries[0], entries.shape[0], grid.weights
        to.sign_bits, to.scales = order.sign_bits, len(order.scales.items)
        if to.weights not in (4, 8) or to.count not in (256, 512, 1024, KT_GRID_COUNT_MAX) or to.scales not in (8, KT_GRID_SCALES):
            raise FormatError(f"{order.name} records: no kernel has a grid of {to.count} entries of {to.weights} weights and "
                              f"{to.scales} scales")
        _fill_bytes(to.index[0], KT_SUPER_GROUP // to.weights, f"{order.name} records: index", order.index, 0)
        _fill_bytes(to.index[1], KT_SUPER_GROUP // to.weights, f"{order.name} records: index", order.index, 1)
        _fill_bytes(to.sign, KT_SUPER_GROUP // 8, f"{order.name} records: sign", order.signs, 0)
        _fill_bytes(to.scale, to.scales, f"{order.name} records: scale", order.scales, 0)


cdef int _fill_bytes(kt_byte *to, size_t count, str what, field, int number) except -1:
    """Say which bits make byte `number` of each of a field's items. what: for messages."""
    if len(field.items) != count:
        raise FormatError(f"{what}: expected {count} items, found {len(field.items)}")
    for i, pieces in enumerate(field.items):
        parts = []
        for piece in pieces:  # an item's byte may have some of a piece's bits
            low, end = max(piece.shift, 8 * number), min(piece.shift + piece.bits, 8 * number + 8)
            if low < end:
                first, shift = piece.first + low - piece.shift, low - 8 * number
                parts.append((piece.byte, (shift - first) % 32, ((1 << end - low) - 1 << shift) * 0x01010101))
        if len(parts) > 2:
            raise FormatError(f"{what} {i}: a byte is made of {len(parts)} pieces; kernels take at most 2")
        for p, part in enumerate(parts):
            to[i].of[p] = kt_bits(part[0], part[1], part[2])
    return 0


cdef dict _grids = {}


cdef const kt_grid *_grid_of(weight_format) except? NULL:
    """What kernels know of a format's records; NULL where they are not packed as they stand. It is never freed, so that formats of one
    order point to the same."""
    cdef _Grid found
    order = weight_format.order
    if not order.packed:
        return NULL
    if (type(order), order.packed) not in ((GridRecords, "grid"), (TernaryRecords, "ternary")):
        raise FormatError(f"{order.name} records: only GridRecords and TernaryRecords are packed as they stand, found a "
                          f"{type(order).__name__} of the family {order.packed!r}")
    found = _grids.get(order)
    if found is None:
        found = _grids.setdefault(order, _Grid(order))
    return &found.grid
