# Records: their planes and fields as the driver has them.

cdef _fill_records(kt_records *to, weight_format):
    """Fill a format's planes and fields. Raises FormatError for what is more than the driver takes."""
    order = weight_format.order
    spares = order.spare_field.moves(1) if order.spare_field else []
    fields = [order.fields[label].moves(scale.dtype.itemsize) for label, scale in weight_format.scales.items()]
    for what, count, most in (
        ("planes", len(order.planes), KT_PLANES_MAX),
        ("weights", order.weights, KT_RECORD_WEIGHTS_MAX),
        ("bytes", order.nbytes, 4 * KT_RECORD_WEIGHTS_MAX),
        ("pieces that mean nothing", len(spares), KT_SPARES_MAX),
        ("pieces of a field", max(map(len, fields), default=0), KT_MOVES_MAX),
    ):
        if count > most:
            raise FormatError(f"{order.name} records have {count} {what}; the packed layout takes at most {most}")
    to.weights, to.bytes, to.code_bits = order.weights, order.nbytes, order.code_bits
    to.planes, to.spares = len(order.planes), len(spares)
    for i, plane in enumerate(order.planes):
        to.plane[i] = kt_plane(plane.offset, plane.run, plane.bits, plane.shift)
    for i, (byte, at, count, first, bits, shift) in enumerate(spares):
        to.spare[i] = kt_move(byte, at, count, first, bits, shift)


cdef class _Fields:
    """A matrix's fields, and the arrays that they are read to, or written from. groups: these arrays, by name."""

    cdef kt_fields fields
    cdef object _groups

    def __cinit__(self, order, groups):
        cdef uint8_t[::1] items
        cdef kt_field *to
        self._groups = groups
        for label, field in order.fields.items():
            array = groups[label]
            items = array.reshape(-1).view(np.uint8)
            to = &self.fields.field[self.fields.count]
            self.fields.count += 1
            moves = field.moves(array.dtype.itemsize)
            to.item_bytes, to.plus, to.moves = len(field.items) * array.dtype.itemsize, field.plus % 256, len(moves)
            to.items = &items[0]
            for i, (byte, at, count, first, bits, shift) in enumerate(moves):
                to.move[i] = kt_move(byte, at, count, first, bits, shift)
