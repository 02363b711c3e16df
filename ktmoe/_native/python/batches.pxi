# What one call computes: its arrays, checked, as the driver has them.

cdef class _Batch:
    """ids: int64 [tokens, top_k]. weights: float32, likewise. mask: uint8 [num_experts]. It holds all arrays that it is given.

    Raises InputError for arrays of other shapes.
    """

    cdef kt_batch batch
    cdef bint empty  # nothing is to be computed
    cdef size_t num_experts
    cdef const int64_t[:, ::1] ids
    cdef const float[:, ::1] weights
    cdef const uint8_t[::1] mask
    cdef const uint32_t[:, ::1] rows
    cdef const uint16_t[:, ::1] x16, h
    cdef const float[:, ::1] x32
    cdef uint16_t[:, ::1] y16
    cdef float[:, ::1] y32

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
        self.ids, self.weights, self.mask = ids, weights, mask
        b.ids, b.weights, b.mask = &ids[0, 0], &weights[0, 0], &mask[0]
        if not self.empty:
            _expect_aligned("ids", b.ids, sizeof(int64_t))
            _expect_aligned("weights", b.weights, sizeof(float))

    cdef int take_x(self, x, size_t hidden) except -1:
        """Take x, uint16 or float32 [tokens, hidden]."""
        if x.dtype == np.float32:
            self.x32 = x
            self.batch.dtype, self.batch.x = KT_F32, &self.x32[0, 0]
            return self._check("x", self.batch.x, KT_F32, self.x32.shape[0], self.x32.shape[1], hidden)
        self.x16 = x
        self.batch.dtype, self.batch.x = KT_BF16, &self.x16[0, 0]
        return self._check("x", self.batch.x, KT_BF16, self.x16.shape[0], self.x16.shape[1], hidden)

    cdef int take_y(self, y, size_t hidden, bint float32=False) except -1:
        """Take y, uint16 or float32 [tokens, hidden]: of x's dtype, if there is an x, or float32 where that may be."""
        cdef kt_dtype dtype = KT_F32 if y.dtype == np.float32 else KT_BF16
        if self.batch.x != NULL and dtype != self.batch.dtype and not (float32 and dtype == KT_F32):
            raise InputError(f"x and out must be alike, found {y.dtype} as the latter's dtype")
        self.batch.y_dtype = dtype
        if dtype == KT_F32:
            self.y32 = y
            self.batch.y = &self.y32[0, 0]
            return self._check("out", self.batch.y, KT_F32, self.y32.shape[0], self.y32.shape[1], hidden)
        self.y16 = y
        self.batch.y = &self.y16[0, 0]
        return self._check("out", self.batch.y, KT_BF16, self.y16.shape[0], self.y16.shape[1], hidden)

    cdef int _check(self, str name, const void *address, kt_dtype dtype, size_t tokens, size_t columns, size_t hidden) except -1:
        """address: of numbers of that dtype."""
        if not self.empty:
            _expect_aligned(name, address, sizeof(float) if dtype == KT_F32 else sizeof(uint16_t))
        if tokens != self.batch.tokens or columns != hidden:
            raise InputError(f"{name} must be {[self.batch.tokens, hidden]}, found {[tokens, columns]}")
        return 0

    cdef int take_h(self, const uint16_t[:, ::1] h, rows, size_t columns, bint distinct) except -1:
        """h: [any, columns]. rows: integers [tokens, top_k], the row of h of each pair whose id is that of an expert.

        distinct: no two of these may have one row.
        """
        rows, shape = np.asarray(rows), (self.batch.tokens, self.batch.top_k)
        if <size_t>h.shape[1] != columns:
            raise InputError(f"h must be [rows, {columns}], found {[h.shape[0], h.shape[1]]}")
        if rows.dtype.kind not in "iu" or rows.shape != shape:
            raise InputError(f"rows must be integers {list(shape)}, found {rows.dtype} {list(rows.shape)}")
        if self.empty:
            return 0
        own = np.array(self.ids)  # nobody else changes it, nor the rows that it was checked with
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
        self.ids, self.rows, self.h = own, checked, h
        self.batch.ids, self.batch.rows = &self.ids[0, 0], &self.rows[0, 0]
        self.batch.h, self.batch.h_columns = <uint16_t *>&self.h[0, 0], columns
        _expect_aligned("h", self.batch.h, sizeof(uint16_t))
        return 0
