# Records: their planes and fields as the driver has them, and their scales and minima as arrays of their own.

cdef _fill_records(kt_records *to, order):
    """Raises FormatError for what is more than the driver takes."""
    if len(order.planes) > KT_PLANES_MAX or order.weights > KT_RECORD_WEIGHTS_MAX or order.nbytes > KT_RECORD_WEIGHTS_MAX * 4:
        raise FormatError(
            f"{order.name} records have {len(order.planes)} planes, {order.weights} weights and {order.nbytes} bytes; the packed "
            f"layout takes at most {KT_PLANES_MAX}, {KT_RECORD_WEIGHTS_MAX} and {KT_RECORD_WEIGHTS_MAX * 4}"
        )
    to.weights, to.bytes, to.code_bits, to.plus = order.weights, order.nbytes, order.code_bits, order.plus % 256
    to.planes = len(order.planes)
    for i, plane in enumerate(order.planes):
        to.plane[i] = kt_plane(plane.offset, plane.run, plane.bits, plane.shift)


cdef _fill_field(kt_field *to, order, field, items):
    cdef uint8_t[::1] view = items.reshape(-1).view(np.uint8)
    moves = field.moves(items.dtype.itemsize)
    if len(moves) > KT_MOVES_MAX:
        raise FormatError(f"{order.name} records have a field of {len(moves)} pieces; the packed layout takes at most {KT_MOVES_MAX}")
    to.item_bytes, to.plus, to.moves = len(field.items) * items.dtype.itemsize, field.plus % 256, len(moves)
    to.items = &view[0]
    for i, (byte, at, count, first, bits, shift) in enumerate(moves):
        to.move[i] = kt_move(byte, at, count, first, bits, shift)


cdef _move_fields(order, stored, fields, to_records, const kt_placement *placement):
    """fields: [(Field, its items, an array that has as many as the records)]. stored: the records' bytes. placement: whose threads
    do it."""
    cdef kt_records records
    cdef kt_fields job
    cdef const uint8_t[::1] view = stored
    cdef int error
    memset(&records, 0, sizeof(records))
    memset(&job, 0, sizeof(job))
    _fill_records(&records, order)
    job.order, job.records, job.count, job.to_records = &records, <uint8_t *>&view[0], stored.size // order.nbytes, to_records
    job.num_fields = len(fields)
    for i, (field, items) in enumerate(fields):
        _fill_field(&job.field[i], order, field, items)
    with nogil:
        kt_pool_lock()
        error = kt_fields_move(placement, &job)
        kt_pool_unlock()
    if error:
        _raise(error, f"reading {order.name} records")


cdef object _groups_of_records(matrix, const kt_placement *placement):
    """WeightFormat.group_rows() of records, by the pool's threads. Raises FormatError where bits are set that mean nothing."""
    weight_format, order, (n, k) = matrix.format, matrix.format.order, matrix.shape
    stored = _bytes(f"{matrix.name} codes", matrix.codes, n * k // order.weights * order.nbytes)
    groups = {label: np.empty(scale.shape(n, k), scale.dtype) for label, scale in weight_format.scales.items()}
    fields = [(order.fields[label], items) for label, items in groups.items()]
    if order.spare_field:
        spare = np.empty((n, k // order.weights * len(order.spare_field.items)), np.uint8)
        fields.append((order.spare_field, spare))
    _move_fields(order, stored, fields, False, placement)
    if order.spare_field and spare.any():
        matrix.refuse()
    return groups


cdef _groups_to_records(weight_format, stored, groups, const kt_placement *placement):
    """Those arrays into records that have their codes already. groups are changed."""
    fields = [(weight_format.order.fields[label], groups[label]) for label in weight_format.scales]
    _move_fields(weight_format.order, stored, fields, True, placement)
