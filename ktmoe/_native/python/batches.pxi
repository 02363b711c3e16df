# What one call computes: its arrays, checked, as the driver has them.

cdef class _Batch:
    """ids: int64 [tokens, top_k]. weights: float32, likewise. mask: uint8 [num_experts]. It holds all arrays that it is given.

    Raises InputError for arrays of other shapes.
    """

    cdef kt_batch batch
    cdef bint empty  # nothing is to be computed
    cdef size_t num_experts
    cdef list held

    def __cinit__(self, const int64_t[:, ::1] ids, const float[:, ::1] weights, const uint8_t[::1] mask, size_t num_experts):
        cdef kt_batch *b = &self.batch
        memset(b, 0, sizeof(kt_batch))
        b.tokens, b.top_k = ids.shape[0], ids.shape[1]
        self.num_experts, self.empty = num_experts, not b.tokens or not b.top_k
        if <size_t>weights.shape[0] != b.tokens or <size_t>weights.shape[1] != b.top_k or <size_t>mask.shape[0] != num_experts:
            raise InputError(
                f"weights and mask must be {[b.tokens, b.top_k]} and [{num_experts}], found "
                f"{[weights.shape[0], weights.shape[1]]} and [{mask.shape[0]}]"
            )
        self.held = [ids, weights, mask]
        b.mask = &mask[0]
        if not self.empty:
            b.ids, b.weights = &ids[0, 0], &weights[0, 0]

    cdef const void *_rows(self, str name, array, size_t hidden) except? NULL:
        """Where an array [tokens, hidden] of uint16 or float32 is, whose dtype becomes the batch's."""
        cdef const uint16_t[:, ::1] of_16
        cdef const float[:, ::1] of_32
        if array.ndim != 2 or <size_t>array.shape[0] != self.batch.tokens or <size_t>array.shape[1] != hidden:
            raise InputError(f"{name} must be {[self.batch.tokens, hidden]}, found {list(array.shape)}")
        if self.empty:
            return NULL
        if array.dtype == np.float32:
            of_32 = array
            self.batch.dtype = KT_F32
            self.held.append(of_32)
            return &of_32[0, 0]
        of_16 = array
        self.batch.dtype = KT_BF16
        self.held.append(of_16)
        return &of_16[0, 0]

    cdef int take_x(self, x, size_t hidden) except -1:
        self.batch.x = self._rows("x", x, hidden)
        return 0

    cdef int take_y(self, y, size_t hidden) except -1:
        if not y.flags.writeable:
            raise InputError("out must be writeable, found a read-only array")
        self.batch.y = <void *>self._rows("out", y, hidden)
        return 0

    cdef int take_h(self, const uint16_t[:, ::1] h, rows, size_t columns, bint distinct) except -1:
        """h: [any, columns]. rows: integers [tokens, top_k], the row of h of each pair whose id is that of an expert.

        distinct: no two of these may have one row.
        """
        cdef const int64_t[:, ::1] ids
        cdef const uint32_t[:, ::1] places
        rows, shape = np.asarray(rows), (self.batch.tokens, self.batch.top_k)
        if <size_t>h.shape[1] != columns:
            raise InputError(f"h must be [rows, {columns}], found {[h.shape[0], h.shape[1]]}")
        if rows.dtype.kind not in "iu" or rows.shape != shape:
            raise InputError(f"rows must be integers {list(shape)}, found {rows.dtype} {list(rows.shape)}")
        if self.empty:
            return 0
        own = np.array(self.held[0])  # nobody else changes it, nor the rows that it was checked with
        used = (own >= 0) & (own < self.num_experts)
        wanted = rows[used]
        wrong = (wanted < 0) | (wanted >= min(h.shape[0], 1 << 32))
        if wrong.any():
            token, slot = np.argwhere(used)[wrong.argmax()]
            raise InputError(f"rows[{token}, {slot}] must be a row of h, of {h.shape[0]}, found {wanted[wrong.argmax()]}")
        if distinct and wanted.size and np.bincount(wanted.astype(np.int64)).max() > 1:
            raise InputError(f"rows must be distinct, found {np.bincount(wanted.astype(np.int64)).argmax()} more than once")
        checked = np.zeros(shape, np.uint32)
        checked[used] = wanted
        ids, places = own, checked
        self.batch.ids, self.batch.rows, self.batch.h_columns = &ids[0, 0], &places[0, 0], columns
        if h.shape[0]:
            self.batch.h = <uint16_t *>&h[0, 0]
        self.held += [ids, places, h]
        return 0
