# A layer's packed experts.

cdef struct memory:
    # One shard's. Experts lie at arena + expert * expert_bytes until they are replaced.
    uint8_t *arena
    size_t nbytes, expert_bytes
    size_t offsets[3]
    uint8_t *spare_map  # one expert's more, from the first replacement on
    uint8_t *spare      # where the next one goes: what the last one replaced


cdef enum outcome:
    DONE
    CLOSED
    INCOMPLETE
    TOO_MANY_KINDS


cdef class PackedLayer:
    """All experts of one layer in the packed layout, one arena a shard, and how to compute them.

    experts: ExpertWeights, whose matrices are not read here. plan: ktmoe.backends.base.Plan. spans: what each shard of its
    placement has of the intermediate dimension, [(first, last)]. threads: for this placement, unless the user chose a number.
    Raises OutOfMemoryError if an arena cannot be had. Every matrix must be packed before forward().
    """

    cdef kt_layer layer
    cdef memory *shards
    cdef size_t num_shards
    cdef readonly size_t nbytes
    cdef size_t intermediate
    cdef size_t missing
    cdef kt_codebook codebooks[3]
    cdef kt_format layouts[3]
    cdef dict _formats
    cdef str _activations, _rounding
    cdef KernelTable _table
    cdef list _spans, _shard_bytes

    def __cinit__(self, KernelTable table, experts, plan, spans, size_t threads):
        cdef memory *m
        self._table = table
        self._formats = experts.formats
        self._activations, self._rounding = plan.activations, plan.rounding
        self._spans = list(spans)
        for p, projection in enumerate(PROJECTIONS):
            _fill_codebook(&self.codebooks[p], self._formats[projection])
            _fill_layout(&self.layouts[p], self._formats[projection])
        self.layer.num_experts, self.layer.hidden = experts.num_experts, experts.hidden
        self.intermediate = experts.intermediate
        self.missing = 3 * self.layer.num_experts
        activation = experts.activation
        self.layer.act = kt_activation(activation.alpha, activation.limit, activation.up_offset)
        self.layer.isa = table.isa
        self.layer.router_weight = {
            "down_output": KT_DOWN_OUTPUT, "down_input": KT_DOWN_INPUT, "expert_input": KT_EXPERT_INPUT
        }[plan.router_weight]
        self.layer.where = _where(plan.placement.cpus, threads)
        self.num_shards = len(self._spans)
        assert self.num_shards == plan.placement.shards
        self.layer.shards = <kt_shard *>calloc(self.num_shards, sizeof(kt_shard))
        self.shards = <memory *>calloc(self.num_shards, sizeof(memory))
        if not self.layer.shards or not self.shards:
            raise OutOfMemoryError(f"the system refused memory for {self.num_shards} shards")
        self._shard_bytes = []
        for i, (first, last) in enumerate(self._spans):
            self.shards[i].expert_bytes = _lay_out_expert(self.layouts, first, last, self.layer.hidden, self.shards[i].offsets)
            self._shard_bytes.append(self.layer.num_experts * <object>self.shards[i].expert_bytes)  # Python's do not wrap
        if sum(self._shard_bytes) > sys.maxsize:
            self._refuse(sum(self._shard_bytes))
        for i, (first, last) in enumerate(self._spans):
            m = &self.shards[i]
            m.nbytes = self._shard_bytes[i]
            self.nbytes += m.nbytes
            self.layer.shards[i].intermediate = last - first
            self.layer.shards[i].experts = <kt_expert *>calloc(self.layer.num_experts, sizeof(kt_expert))
            m.arena = <uint8_t *>kt_os_map(m.nbytes)
            if not self.layer.shards[i].experts or not m.arena:
                self._refuse(m.nbytes)

    cdef _refuse(self, nbytes):
        raise OutOfMemoryError(
            f"packed weights of {self.layer.num_experts} experts need {nbytes} bytes; the system refused them"
        )

    def __dealloc__(self):
        self._free()

    cdef void _free(self) noexcept nogil:
        cdef size_t i, e
        cdef int p
        for i in range(self.num_shards if self.shards and self.layer.shards else 0):
            for e in range(self.layer.num_experts if self.layer.shards[i].experts else 0):
                for p in range(3):
                    free(<void *>self._matrix(i, e, p).bias)
            kt_os_unmap(self.shards[i].arena, self.shards[i].nbytes)
            kt_os_unmap(self.shards[i].spare_map, self.shards[i].expert_bytes)
            free(self.layer.shards[i].experts)
        free(self.shards)
        free(self.layer.shards)
        self.shards = NULL
        self.layer.shards = NULL

    def close(self):
        """Give the memory back, after the forward calls that are running."""
        with nogil:
            kt_pool_lock()
            self._free()
            kt_pool_unlock()

    cdef int _check_expert(self, size_t expert) except -1:
        if expert >= self.layer.num_experts:
            raise InputError(f"expert must be in [0, {self.layer.num_experts}), found {expert}")

    cdef kt_matrix *_matrix(self, size_t shard, size_t expert, int projection) noexcept nogil:
        cdef kt_expert *e = &self.layer.shards[shard].experts[expert]
        return &e.gate if projection == 0 else &e.up if projection == 1 else &e.down

    def pack(self, size_t expert, matrices):
        """Pack an expert's Matrices, by projection. An expert that was packed is replaced: the three matrices must come together,
        and each forward call sees all of the old ones or all of the new.

        Raises InputError for what is not a Matrix; FormatError, which names the tensor, for a scale or a weight that is not
        finite and for an array that was resized. What was there then stays.
        """
        cdef kt_share shares[KT_SHARDS_MAX * 3]
        cdef kt_matrix fresh[KT_SHARDS_MAX * 3]
        cdef kt_scan scans[3]
        cdef const kt_kernel *kernels[3][2]
        cdef uint8_t lows[3]
        cdef uint8_t highs[3]
        cdef const uint8_t[::1] codes, scales
        cdef const uint8_t *scales_at
        cdef size_t n, k
        cdef int p, error = 0
        cdef outcome result = DONE
        cdef size_t i
        self._check_expert(expert)
        memset(shares, 0, sizeof(shares))
        memset(fresh, 0, sizeof(fresh))
        memset(kernels, 0, sizeof(kernels))
        matrices, held = dict(matrices), []  # held: while it is, numpy does not resize it unless it is told not to count references
        for projection, matrix in matrices.items():
            if not isinstance(matrix, Matrix):
                raise InputError(f"expert {expert}: {projection} must be a Matrix, found {type(matrix).__name__}")
            p = PROJECTIONS.index(projection)
            weight_format = self._formats[projection]
            n, k = self.intermediate, self.layer.hidden
            if p == 2:
                n, k = k, n
            if matrix.shape != (n, k) or matrix.format != weight_format:
                raise FormatError(
                    f"{matrix.name}: {projection} must be {weight_format.description} [{n}, {k}], "
                    f"found {matrix.format.description} {list(matrix.shape)}"
                )
            if not self._table.choose(weight_format, self._activations, self._rounding, kernels[p], &lows[p], &highs[p]):
                raise UnavailableError(
                    f"{matrix.name}: {self._table.name} has no kernel for {weight_format.description}, "
                    f"activations {self._activations}"
                )
            codes = _bytes(f"{matrix.name} codes", matrix.codes, n * _codes_bytes(&self.layouts[p], k))
            held.append(codes)
            scales_at = NULL
            if weight_format.scale is not None:
                scales = _bytes(f"{matrix.name} scales", matrix.scales, n * _scales_bytes(&self.layouts[p], k))
                held.append(scales)
                scales_at = &scales[0]
            for i in range(self.num_shards):
                first, last = self._spans[i]
                shares[3 * i + p] = _share(p, &self.layouts[p], first, last, self.layer.hidden)
                _point(&shares[3 * i + p], &codes[0], scales_at, k)
                # Gate and up of one format share a codebook, so that one kernel call can take both.
                fresh[3 * i + p].codebook = &self.codebooks[0 if weight_format == self._formats["gate"] else p]
        try:
            for projection, matrix in matrices.items():
                p = PROJECTIONS.index(projection)
                for i in range(self.num_shards):
                    fresh[3 * i + p].bias = _shard_bias(matrix, &shares[3 * i + p], self.layer.hidden if p == 2 else self.intermediate)
            with nogil:
                kt_pool_lock()
                result = self._install(expert, shares, fresh, kernels, lows, highs, scans, &error)
                kt_pool_unlock()
        finally:
            for i in range(3 * self.num_shards):
                free(<void *>fresh[i].bias)  # those that were replaced, or were not installed
        names = ", ".join(matrix.name for matrix in matrices.values())
        if error:
            _raise(error, f"packing {names}")
        if result == CLOSED:
            raise ClosedError("this layer was closed")
        if result == INCOMPLETE:
            raise InputError(f"expert {expert} is replaced by three matrices, {PROJECTIONS}, found {tuple(matrices)}")
        for p, projection in enumerate(PROJECTIONS):
            if projection in matrices and scans[p].refused:
                matrices[projection].refuse()
                raise FormatError(f"{matrices[projection].name}: a scale or a weight was not finite while it was packed")
        if result == TOO_MANY_KINDS:
            raise UnavailableError(f"{self._table.name}'s kernels take x in more ways than one layer can have: {KT_X_KINDS}")

    cdef outcome _install(self, size_t expert, kt_share *shares, kt_matrix *fresh, const kt_kernel *(*kernels)[2],
                          const uint8_t *lows, const uint8_t *highs, kt_scan *scans, int *error) noexcept nogil:
        """Pack and then swap, with the pool's lock held, which every forward call holds from its beginning to its end; fresh
        has then what was replaced."""
        cdef size_t i
        cdef int p, given = 0, old = 0
        cdef memory *m
        cdef kt_matrix *matrix
        cdef uint8_t *replaced = NULL
        memset(scans, 0, 3 * sizeof(kt_scan))
        if not self.layer.shards:
            return CLOSED
        for p in range(3):
            given += shares[p].format != NULL
            old += shares[p].format != NULL and self._matrix(0, expert, p).data != NULL
        if old and given < 3:
            return INCOMPLETE
        for i in range(self.num_shards):
            m = &self.shards[i]
            if old and not m.spare_map:
                m.spare_map = m.spare = <uint8_t *>kt_os_map(m.expert_bytes)
                if not m.spare_map:
                    error[0] = errno_.ENOMEM
                    return DONE
            for p in range(3):
                shares[3 * i + p].packed = (m.spare if old else m.arena + expert * m.expert_bytes) + m.offsets[p]
        error[0] = kt_pack(self.layer.where, shares, scans)
        if error[0] or scans[0].refused or scans[1].refused or scans[2].refused:
            return DONE
        for i in range(self.num_shards):
            for p in range(3):
                if shares[p].format and not self._use(
                    p, &shares[3 * i + p], &fresh[3 * i + p], kernels[p][lows[p] <= scans[p].low and scans[p].high <= highs[p]]
                ):
                    return TOO_MANY_KINDS
        for i in range(self.num_shards):
            for p in range(3):
                if shares[p].format:
                    matrix = self._matrix(i, expert, p)
                    if matrix.data:
                        replaced = <uint8_t *>matrix.data - self.shards[i].offsets[p]
                    self.missing -= i == 0 and not matrix.data
                    matrix[0], fresh[3 * i + p] = fresh[3 * i + p], matrix[0]
            if old:
                self.shards[i].spare = replaced
        return DONE

    cdef bint _use(self, int p, const kt_share *share, kt_matrix *matrix, const kt_kernel *kernel) noexcept nogil:
        matrix.data = share.packed
        matrix.panel_bytes = share.format.packing.panel_bytes(share.format, share.k)
        matrix.group = share.format.group
        return kt_moe_use(&self.layer, matrix, p == 2, kernel)

    def replace(self, size_t expert, matrices):
        """As pack() does for an expert that was packed."""
        self.pack(expert, matrices)

    def export(self, size_t expert, parts):
        """The checkpoint's own bytes again, in Matrix's dtypes: part i of `parts` gets the i-th rows of gate and up and the i-th
        columns of down. parts: [{projection: (codes, scales or None)}], C-contiguous arrays to write into, whose shapes are right.
        Returns {projection: bias, float32 [n]} of those matrices that have one.
        """
        cdef kt_share shares[KT_SHARDS_MAX * 3]
        cdef kt_piece *pieces
        cdef float *biases[3]
        cdef bint biased[3]
        cdef float[::1] bias
        cdef int p, error = 0
        cdef bint closed, missing = False
        cdef size_t i, count = 0, num_parts = len(parts)
        self._check_expert(expert)
        memset(shares, 0, sizeof(shares))
        wanted = [(i, PROJECTIONS.index(projection), arrays) for i, part in enumerate(parts) for projection, arrays in part.items()]
        for i in range(self.num_shards):
            for _, p, _ in wanted:
                shares[3 * i + p] = _share(p, &self.layouts[p], self._spans[i][0], self._spans[i][1], self.layer.hidden)
        memset(biases, 0, sizeof(biases))
        memset(biased, 0, sizeof(biased))
        whole = {}
        for p in {p for _, p, _ in wanted}:
            whole[p] = bias = np.empty(self.layer.hidden if p == 2 else self.intermediate, np.float32)
            biases[p] = &bias[0]
        held = []
        pieces = <kt_piece *>calloc(len(wanted), sizeof(kt_piece))
        if not pieces:
            raise OutOfMemoryError(f"exporting expert {expert}: the system refused memory for {len(wanted)} pieces")
        try:
            for i, p, arrays in wanted:
                held += _fill_piece(&pieces[count], p, &self.layouts[p], arrays, i * self.intermediate // num_parts,
                                    self.intermediate // num_parts, self.layer.hidden)
                count += 1
            with nogil:
                kt_pool_lock()
                closed = self.layer.shards == NULL
                for i in range(0 if closed else self.num_shards):
                    for p in range(3):
                        shares[3 * i + p].packed = <uint8_t *>self._matrix(i, expert, p).data
                        missing = missing or (shares[3 * i + p].format and not shares[3 * i + p].packed)
                if not closed and not missing:
                    error = kt_unpack(self.layer.where, shares, pieces, count)
                    for i in range(self.num_shards):
                        for p in range(3):
                            if biases[p]:
                                biased[p] |= _copy_bias(&shares[3 * i + p], self._matrix(i, expert, p).bias, biases[p])
                kt_pool_unlock()
        finally:
            free(pieces)
        if closed:
            raise ClosedError("this layer was closed")
        if missing:
            raise InputError(f"expert {expert} was not packed")
        if error:
            _raise(error, f"exporting expert {expert}")
        return {PROJECTIONS[p]: array for p, array in whole.items() if biased[p]}

    def unpack(self, size_t expert, str projection):
        """One matrix's (codes, scales or None) of export()."""
        n, k = self.intermediate, self.layer.hidden
        stored = self._formats[projection].empty(*((k, n) if projection == "down" else (n, k)))
        self.export(expert, [{projection: stored}])
        return stored

    def packed_bytes(self, size_t expert, str projection):
        """A copy of one matrix's packed bytes, of the first shard, uint8 [panels, panel bytes]: for the layout's golden tests."""
        cdef int p = PROJECTIONS.index(projection)
        cdef const uint8_t *data = NULL
        cdef bint closed
        self._check_expert(expert)
        first, last = self._spans[0]
        cdef kt_share share = _share(p, &self.layouts[p], first, last, self.layer.hidden)
        cdef size_t panels = (share.n + KT_PANEL - 1) // KT_PANEL
        cdef uint8_t[:, ::1] to = np.empty((panels, share.format.packing.panel_bytes(share.format, share.k)), np.uint8)
        with nogil:
            kt_pool_lock()
            closed = self.layer.shards == NULL
            if not closed:
                data = self._matrix(0, expert, p).data
            if data:
                memcpy(&to[0, 0], data, to.shape[0] * to.shape[1])
            kt_pool_unlock()
        if closed:
            raise ClosedError("this layer was closed")
        if not data:
            raise InputError(f"expert {expert}'s {projection} was not packed")
        return np.asarray(to)

    def kernels(self):
        """{(expert, projection): whether its scales are folded}."""
        cdef uint8_t[:, ::1] folded = np.zeros((self.layer.num_experts, 3), np.uint8)
        cdef size_t e, missing
        cdef int p
        cdef bint closed
        with nogil:
            kt_pool_lock()
            closed, missing = self.layer.shards == NULL, self.missing
            for e in range(0 if closed or missing else self.layer.num_experts):
                for p in range(3):
                    folded[e, p] = self._matrix(0, e, p).kernel.folded
            kt_pool_unlock()
        self._check_whole(closed, missing)
        return {(e, name): bool(folded[e, p]) for e in range(self.layer.num_experts) for p, name in enumerate(PROJECTIONS)}

    cdef int _check_whole(self, bint closed, size_t missing) except -1:
        if closed:
            raise ClosedError("this layer was closed")
        if missing:
            raise InputError(f"{missing} matrices of this layer were not packed")

    @property
    def rounding(self):
        """"folded" if any scaled weight is rounded to bfloat16, else "exact"."""
        cdef bint rounds[3]
        cdef bint rounded = False, closed
        cdef kt_matrix *matrix
        cdef size_t e
        cdef int p
        for p, projection in enumerate(PROJECTIONS):
            scale = self._formats[projection].scale
            rounds[p] = scale is not None and scale.kind == "bf16"
        with nogil:
            kt_pool_lock()
            closed = self.layer.shards == NULL
            for e in range(0 if closed else self.layer.num_experts):
                for p in range(3):
                    matrix = self._matrix(0, e, p)
                    rounded = rounded or (rounds[p] and matrix.data and matrix.kernel.folded)
            kt_pool_unlock()
        self._check_whole(closed, 0)
        return "folded" if rounded else "exact"

    def forward(self, x, const int64_t[:, ::1] ids, const float[:, ::1] weights, const uint8_t[::1] mask, out):
        """y into out. x, out: uint16 (bf16 bits) or float32 [tokens, hidden], C-contiguous, alike; tokens and top_k above 0."""
        cdef kt_batch batch
        cdef const uint16_t[:, ::1] x16
        cdef const float[:, ::1] x32
        cdef uint16_t[:, ::1] y16
        cdef float[:, ::1] y32
        cdef int error = 0
        cdef bint closed
        cdef size_t missing
        memset(&batch, 0, sizeof(batch))
        if x.dtype == np.float32:
            x32, y32 = x, out
            batch.dtype, batch.x, batch.y = KT_F32, &x32[0, 0], &y32[0, 0]
            shapes = {(x32.shape[0], x32.shape[1]), (y32.shape[0], y32.shape[1])}
        else:
            x16, y16 = x, out
            batch.dtype, batch.x, batch.y = KT_BF16, &x16[0, 0], &y16[0, 0]
            shapes = {(x16.shape[0], x16.shape[1]), (y16.shape[0], y16.shape[1])}
        batch.tokens, batch.top_k = ids.shape[0], ids.shape[1]
        batch.ids, batch.weights, batch.mask = &ids[0, 0], &weights[0, 0], &mask[0]
        if (
            shapes != {(ids.shape[0], self.layer.hidden)}
            or weights.shape[0] != ids.shape[0] or weights.shape[1] != ids.shape[1] or <size_t>mask.shape[0] != self.layer.num_experts
        ):
            raise InputError(
                f"x and out must be [{ids.shape[0]}, {self.layer.hidden}] and alike, found {x.dtype} {list(x.shape)} and "
                f"{out.dtype} {list(out.shape)}; weights and mask {[ids.shape[0], ids.shape[1]]} and [{self.layer.num_experts}], "
                f"found {[weights.shape[0], weights.shape[1]]} and [{mask.shape[0]}]"
            )
        with nogil:
            kt_pool_lock()
            closed, missing = self.layer.shards == NULL, self.missing
            if not closed and not missing:
                error = kt_moe_forward(&self.layer, &batch)
            kt_pool_unlock()
        self._check_whole(closed, missing)
        if error:
            _raise(error, f"forward of {batch.tokens} tokens")

    def read_seconds(self, KernelTable table, offset, nbytes):
        """Seconds in which all threads of the pool read that range of the packed weights: the read-bandwidth limit.

        Each shard's threads read that range's share of their own.
        """
        cdef const uint8_t *at[KT_SHARDS_MAX]
        cdef size_t shares[KT_SHARDS_MAX]
        cdef size_t begins[KT_SHARDS_MAX]
        cdef size_t i
        cdef double seconds = 0
        cdef bint closed
        offset, nbytes = operator.index(offset), operator.index(nbytes)  # Python's integers do not wrap
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise InputError(f"range [{offset}, {offset + nbytes}) is not within the {self.nbytes} packed bytes")
        for i, own in enumerate(self._shard_bytes):
            begins[i], shares[i] = offset * own // self.nbytes, nbytes * own // self.nbytes
        with nogil:
            kt_pool_lock()
            closed = self.layer.shards == NULL
            if not closed:
                for i in range(self.num_shards):
                    at[i] = self.shards[i].arena + begins[i]
                seconds = kt_limit_read(table.isa.read, self.layer.where, at, shares)
            kt_pool_unlock()
        self._check_whole(closed, 0)
        if seconds < 0:
            _raise(<int>-seconds, "measuring the read bandwidth")
        return seconds
