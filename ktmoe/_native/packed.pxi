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
    cdef dict _formats, _biases
    cdef str _activations, _scales
    cdef KernelTable _table
    cdef list _spans

    def __cinit__(self, KernelTable table, experts, plan, spans, size_t threads):
        cdef memory *m
        self._table = table
        self._formats = experts.formats
        self._activations, self._scales = plan.activations, plan.scales
        self._biases = {}
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
        for i, (first, last) in enumerate(self._spans):
            m = &self.shards[i]
            m.expert_bytes = _lay_out_expert(self.layouts, first, last, self.layer.hidden, m.offsets)
            m.nbytes = m.expert_bytes * self.layer.num_experts
            self.nbytes += m.nbytes
            self.layer.shards[i].intermediate = last - first
            self.layer.shards[i].experts = <kt_expert *>calloc(self.layer.num_experts, sizeof(kt_expert))
            m.arena = <uint8_t *>kt_os_map(m.nbytes)
            if not self.layer.shards[i].experts or not m.arena:
                raise OutOfMemoryError(
                    f"packed weights of {self.layer.num_experts} experts need {m.nbytes} bytes; the system refused them"
                )

    def __dealloc__(self):
        self._free()

    cdef void _free(self) noexcept nogil:
        cdef size_t i
        for i in range(self.num_shards if self.shards and self.layer.shards else 0):
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

    cdef kt_matrix *_packed(self, size_t expert, int projection) except NULL:
        """Of the first shard, for what is the same in all."""
        self._check_expert(expert)
        if not self.layer.shards:
            raise ClosedError("this layer was closed")
        cdef kt_matrix *matrix = self._matrix(0, expert, projection)
        if not matrix.data:
            raise InputError(f"expert {expert}'s {PROJECTIONS[projection]} was not packed")
        return matrix

    def pack(self, size_t expert, matrices):
        """Pack an expert's Matrices, by projection. An expert that was packed is replaced: the three matrices must come together,
        and each forward call sees all of the old ones or all of the new.

        Raises FormatError, which names the tensor, for a scale or a weight that is not finite; what was there then stays.
        """
        cdef kt_share shares[KT_SHARDS_MAX * 3]
        cdef kt_matrix fresh[KT_SHARDS_MAX * 3]
        cdef kt_scan scans[3]
        cdef const kt_kernel *kernels[3][2]
        cdef uint8_t lows[3]
        cdef uint8_t highs[3]
        cdef const uint8_t[::1] codes, scales
        cdef const uint8_t *scales_at
        cdef const float[::1] bias_view
        cdef int p, error = 0
        cdef outcome result
        cdef size_t i
        self._check_expert(expert)
        memset(shares, 0, sizeof(shares))
        memset(fresh, 0, sizeof(fresh))
        memset(kernels, 0, sizeof(kernels))
        biases = {}
        for projection, matrix in matrices.items():
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
            self._find_kernels(matrix, weight_format, kernels[p], &lows[p], &highs[p])
            codes = matrix.codes.reshape(-1).view(np.uint8)
            scales_at = NULL
            if matrix.scales is not None:
                scales = matrix.scales.reshape(-1).view(np.uint8)
                scales_at = &scales[0]
            biases[projection] = self._shard_biases(matrix, p)
            for i in range(self.num_shards):
                first, last = self._spans[i]
                shares[3 * i + p] = _share(p, &self.layouts[p], first, last, self.layer.hidden)
                _point(&shares[3 * i + p], &codes[0], scales_at, k)
                # Gate and up of one format share a codebook, so that one kernel call can take both.
                fresh[3 * i + p].codebook = &self.codebooks[0 if weight_format == self._formats["gate"] else p]
                if biases[projection][i] is not None:
                    bias_view = biases[projection][i]
                    fresh[3 * i + p].bias = &bias_view[0]
        with nogil:
            kt_pool_lock()
            result = self._install(expert, shares, fresh, kernels, lows, highs, scans, &error)
            kt_pool_unlock()
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
        if result == TOO_MANY_KINDS:
            raise UnavailableError(f"{self._table.name}'s kernels take x in more ways than one layer can have: {KT_X_KINDS}")
        for projection in matrices:
            self._biases[expert, projection] = biases[projection]

    cdef int _find_kernels(self, matrix, weight_format, const kt_kernel **kernels, uint8_t *low, uint8_t *high) except -1:
        """kernels[1] where all scales are in [low, high], which fold into the weights, else kernels[0]."""
        kind = weight_format.scale.kind if weight_format.scale else None
        kernels[0] = kernels[1] = self._table.find(weight_format, self._activations, False)
        low[0], high[0] = 0, 255
        if kind == "ue8m0" or (kind == "bf16" and self._scales == "folded"):
            low[0], high[0] = codebook.fold_range(weight_format.codebook, kind)
            kernels[1] = self._table.find(weight_format, self._activations, True)
            if not kernels[1]:  # those for any scale serve these, too
                kernels[1] = kernels[0]
        if not kernels[0]:
            raise UnavailableError(
                f"{matrix.name}: {self._table.name} has no kernel for {weight_format.description}, activations {self._activations}"
            )

    def _shard_biases(self, matrix, int projection):
        """What is added to each shard's output, float32 padded to whole panels, or None; down's belongs to the first."""
        if matrix.bias is None:
            return [None for _ in self._spans]
        if not np.isfinite(matrix.bias).all():
            matrix.refuse()
        if projection == 2:
            parts = [matrix.bias, *(None for _ in self._spans[1:])]
        else:
            parts = [matrix.bias[first:last] for first, last in self._spans]
        return [None if part is None else np.pad(part, (0, -len(part) % KT_PANEL)) for part in parts]

    cdef outcome _install(self, size_t expert, kt_share *shares, kt_matrix *fresh, const kt_kernel *(*kernels)[2],
                          const uint8_t *lows, const uint8_t *highs, kt_scan *scans, int *error) noexcept nogil:
        """Pack and then swap, with the pool's lock held, which every forward call holds from its beginning to its end."""
        cdef size_t i
        cdef int p, given = 0, old = 0
        cdef memory *m
        cdef const uint8_t *replaced
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
            replaced = self._matrix(i, expert, 0).data  # gate comes first in an expert's bytes
            for p in range(3):
                if shares[p].format:
                    self.missing -= i == 0 and not self._matrix(0, expert, p).data
                    self._matrix(i, expert, p)[0] = fresh[3 * i + p]
            if old:
                self.shards[i].spare = <uint8_t *>replaced
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
        Returns {projection: bias, float32 [n]} where there are any.
        """
        cdef kt_share shares[KT_SHARDS_MAX * 3]
        cdef kt_piece *pieces
        cdef int p, error = 0
        cdef bint closed, missing = False
        cdef size_t i, count = 0, num_parts = len(parts)
        self._check_expert(expert)
        memset(shares, 0, sizeof(shares))
        wanted = [(i, PROJECTIONS.index(projection), arrays) for i, part in enumerate(parts) for projection, arrays in part.items()]
        for i in range(self.num_shards):
            for _, p, _ in wanted:
                shares[3 * i + p] = _share(p, &self.layouts[p], self._spans[i][0], self._spans[i][1], self.layer.hidden)
        pieces = <kt_piece *>calloc(len(wanted), sizeof(kt_piece))
        if not pieces:
            raise OutOfMemoryError(f"exporting expert {expert}: the system refused memory for {len(wanted)} pieces")
        try:
            for i, p, arrays in wanted:
                _fill_piece(&pieces[count], p, arrays, i * self.intermediate // num_parts, self.intermediate // num_parts,
                            self.layer.hidden)
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
                kt_pool_unlock()
        finally:
            free(pieces)
        if closed:
            raise ClosedError("this layer was closed")
        if missing:
            raise InputError(f"expert {expert} was not packed")
        if error:
            _raise(error, f"exporting expert {expert}")
        biases = {}
        for projection in PROJECTIONS:
            parts = [part for part in self._biases.get((expert, projection), ()) if part is not None]
            if parts:
                spans = [(0, self.layer.hidden)] if projection == "down" else self._spans
                biases[projection] = np.concatenate([part[: b - a] for part, (a, b) in zip(parts, spans, strict=True)])
        return biases

    def unpack(self, size_t expert, str projection):
        """One matrix's (codes, scales or None) of export()."""
        n, k = self.intermediate, self.layer.hidden
        stored = self._formats[projection].empty(*((k, n) if projection == "down" else (n, k)))
        self.export(expert, [{projection: stored}])
        return stored

    def packed_bytes(self, size_t expert, str projection):
        """A copy of one matrix's packed bytes, of the first shard, uint8 [panels, panel bytes]: for the layout's golden tests."""
        cdef int p = PROJECTIONS.index(projection)
        cdef kt_matrix *matrix = self._packed(expert, p)
        cdef size_t n = self.layer.hidden if p == 2 else self.layer.shards[0].intermediate
        copy = np.empty(((n + KT_PANEL - 1) // KT_PANEL, matrix.panel_bytes), np.uint8)
        cdef uint8_t[:, ::1] to = copy
        memcpy(&to[0, 0], matrix.data, copy.nbytes)
        return copy

    def kernels(self):
        """{(expert, projection): whether its scales are folded}."""
        return {
            (e, name): bool(self._packed(e, p).kernel.folded)
            for e in range(self.layer.num_experts)
            for p, name in enumerate(PROJECTIONS)
        }

    @property
    def scales(self):
        """"folded" if any scaled weight is rounded to bfloat16, else "exact"."""
        rounded = {
            projection for (_, projection), folded in self.kernels().items()
            if folded and self._formats[projection].scale.kind == "bf16"
        }
        return "folded" if rounded else "exact"

    def forward(self, x, const int64_t[:, ::1] ids, const float[:, ::1] weights, const uint8_t[::1] mask, out):
        """y into out. x, out: uint16 (bf16 bits) or float32 [tokens, hidden], C-contiguous, alike; tokens and top_k above 0."""
        cdef kt_batch batch
        cdef const uint16_t[:, ::1] x16
        cdef const float[:, ::1] x32
        cdef uint16_t[:, ::1] y16
        cdef float[:, ::1] y32
        cdef int error
        cdef bint closed
        memset(&batch, 0, sizeof(batch))
        if x.dtype == np.float32:
            x32, y32 = x, out
            batch.dtype, batch.x, batch.y = KT_F32, &x32[0, 0], &y32[0, 0]
        else:
            x16, y16 = x, out
            batch.dtype, batch.x, batch.y = KT_BF16, &x16[0, 0], &y16[0, 0]
        batch.tokens, batch.top_k = ids.shape[0], ids.shape[1]
        batch.ids, batch.weights, batch.mask = &ids[0, 0], &weights[0, 0], &mask[0]
        if (
            x.shape != (ids.shape[0], self.layer.hidden) or out.shape != x.shape or out.dtype != x.dtype
            or weights.shape[0] != ids.shape[0] or weights.shape[1] != ids.shape[1] or <size_t>mask.shape[0] != self.layer.num_experts
        ):
            raise InputError(
                f"x and out must be [{ids.shape[0]}, {self.layer.hidden}] and alike, found {x.dtype} {list(x.shape)} and "
                f"{out.dtype} {list(out.shape)}; weights and mask {[ids.shape[0], ids.shape[1]]} and [{self.layer.num_experts}], "
                f"found {[weights.shape[0], weights.shape[1]]} and [{mask.shape[0]}]"
            )
        if self.missing:
            raise InputError(f"{self.missing} matrices of this layer were not packed")
        with nogil:
            kt_pool_lock()
            closed = self.layer.shards == NULL
            error = 0 if closed else kt_moe_forward(&self.layer, &batch)
            kt_pool_unlock()
        if closed:
            raise ClosedError("this layer was closed")
        if error:
            _raise(error, f"forward of {batch.tokens} tokens")

    def read_seconds(self, KernelTable table, size_t offset, size_t nbytes):
        """Seconds in which all threads of the pool read that range of the packed weights: the read-bandwidth limit.

        Each shard's threads read that range's share of their own.
        """
        cdef const uint8_t *at[KT_SHARDS_MAX]
        cdef size_t shares[KT_SHARDS_MAX]
        cdef size_t i
        cdef double seconds
        if not self.layer.shards or offset + nbytes > self.nbytes:
            raise InputError(f"range [{offset}, {offset + nbytes}) is not within the {self.nbytes} packed bytes")
        for i in range(self.num_shards):
            share = self.shards[i].nbytes / self.nbytes
            at[i], shares[i] = self.shards[i].arena + <size_t>(offset * share), <size_t>(nbytes * share)
        with nogil:
            seconds = kt_limit_read(table.isa.read, self.layer.where, at, shares)
        if seconds < 0:
            _raise(<int>-seconds, "measuring the read bandwidth")
        return seconds
