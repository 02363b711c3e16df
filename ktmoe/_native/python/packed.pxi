# A layer's packed experts. layer/experts.c has their memory and says which shard has what; here is what Python objects say.

cdef class _PackedExperts:
    """All experts of one layer, or a dense matrix, in the packed layout, one arena a shard.

    experts: ExpertWeights or LinearWeights, whose matrices are not read here. plan: ktmoe.backends.base.Plan. ranges: each shard's columns of h,
    [(first, last)], as many as the plan's placement has shards. threads: for this placement, unless the user chose a number.
    file: an ArenaFile, whose bytes are the arenas; adopt() then takes the place of pack(). form: of the rows that kernels take;
    None: the plan's mode. x, h: the BlockRule that they are rounded by before, or None.
    Raises OutOfMemoryError if an arena cannot be had, CacheError for a file that changed. Every matrix must be packed before
    forward().
    """

    cdef kt_experts experts
    cdef kt_given _kernels[3]  # that each projection's format has, and nothing else
    cdef size_t num_shards
    cdef readonly size_t nbytes
    cdef object _spec  # ktmoe.experts.WeightSpec
    cdef object _domains  # of each shard: what tells placements apart
    cdef tuple _names  # of an expert's matrices, in their order
    cdef str _form
    cdef BlockRule _x, _h
    cdef KernelTable _table
    cdef list _shard_bytes, _columns  # of each shard; columns of h
    cdef str _file  # whose bytes the arenas are, for messages; None if there is none

    def __cinit__(self, KernelTable table, experts, plan, ranges, size_t threads, ArenaFile file=None, str form=None,
                  BlockRule x=None, BlockRule h=None):
        cdef size_t columns[KT_SHARDS_MAX][2]
        cdef kt_layer *layer = &self.experts.layer
        self._table = table
        self._spec, self._domains = experts.spec, plan.placement.domains
        self._names = experts.projections
        self._form = form or plan.activations
        self._x, self._h = x, h
        if x is not None:
            layer.round_x = &x.rule
        if h is not None:
            layer.round_h = &h.rule
        for p, projection in enumerate(self._names):
            _fill_codebook(&self.experts.codebooks[p], self._spec.formats[projection])
            _fill_format(&self.experts.formats[p], self._spec.formats[projection])
            table.find_both(self._spec.formats[projection], self._form, plan, &self._kernels[p])
        layer.num_experts, layer.hidden = experts.num_experts, experts.hidden
        self.experts.intermediate, self.experts.matrices = experts.intermediate, len(self._names)
        layer.isa = table.isa
        layer.placement = _placed(plan.placement.domains, threads, plan.placement.nodes) if plan.placement.nodes else NULL
        self.num_shards = len(ranges)
        assert self.num_shards == plan.placement.shards
        self._columns = [last - first for first, last in ranges]
        for i, (first, last) in enumerate(ranges):
            columns[i][0], columns[i][1] = first, last - first
        total = experts.num_experts * expert_nbytes(experts, ranges)
        if file is not None:
            file.map(&self.experts, columns)
        elif total > sys.maxsize or not kt_experts_map(&self.experts, columns):
            raise OutOfMemoryError(f"packed weights of {self._spec.amount} need {total} bytes; the system refused them")
        self._file = None if file is None else file.name
        self.nbytes = total
        self._shard_bytes = [self.experts.memory[i].arena_bytes for i in range(self.num_shards)]

    def __dealloc__(self):
        kt_experts_free(&self.experts)

    def close(self):
        """Give the memory back, after the forward calls that are running."""
        with nogil:
            kt_pool_lock()
            kt_experts_free(&self.experts)
            kt_pool_unlock()

    cdef (size_t, size_t) _shape(self, size_t projection) noexcept:
        """(n, k) of a projection's matrices."""
        if projection == 2:
            return self.experts.layer.hidden, self.experts.intermediate
        return self.experts.intermediate, self.experts.layer.hidden

    cdef object _give(self, kt_given *given, size_t projection, matrix):
        """Point at a Matrix's bytes. Returns what has to be held until they were read."""
        cdef const uint8_t[::1] codes, numbers
        cdef const float[::1] bias, factor
        cdef _Fields fields
        weight_format = matrix.format
        given[0] = self._kernels[projection]
        if not given.kernels[0]:
            raise UnavailableError(
                f"{matrix.name}: {self._table.name} has no kernel for {weight_format.description}, rows of the form {self._form}"
            )
        given_bytes = {}
        for label, (dtype, shape) in weight_format.arrays(*matrix.shape).items():
            given_bytes[label] = _bytes(f"{matrix.name} {label}", getattr(matrix, label), dtype.itemsize * math.prod(shape))
        in_records = self.experts.formats[projection].order.records.bytes > 0
        groups = staged(matrix, in_records)
        codes = given_bytes["codes"]
        if "codes" in groups:
            dtype, shape = dataclasses.replace(weight_format, order=ROWS).arrays(*matrix.shape)["codes"]
            rows = np.ascontiguousarray(groups["codes"])
            codes = _bytes(f"{matrix.name} codes in rows", rows, dtype.itemsize * math.prod(shape))
        given.codes = &codes[0]
        held = [codes]
        if in_records:
            fields = _Fields(weight_format.order, groups)
            given.fields = &fields.fields
            held.append(fields)
        for i, (label, how) in enumerate(_group_arrays(weight_format)):
            if not how:
                continue
            size = self.experts.formats[projection].groups[i].bytes * math.prod(how.shape(*matrix.shape))
            numbers = _bytes(f"{matrix.name} {label}", np.ascontiguousarray(groups[label]), size)
            given.groups[i] = &numbers[0]
            held.append(numbers)
        if "factor" in given_bytes:
            factor = given_bytes["factor"].view(np.float32)
            given.factor = &factor[0]
            given.factor_per_row, given.divides = weight_format.factor.per_row, weight_format.factor.divides
            held.append(factor)
        if matrix.bias is not None:
            bias = _bytes(f"{matrix.name} bias", matrix.bias, matrix.shape[0] * sizeof(float)).view(np.float32)
            given.bias = &bias[0]
            held.append(bias)
        return held

    def pack(self, size_t expert, matrices):
        """Pack an expert's Matrices, by projection. An expert that was packed is replaced: the three matrices must come together,
        and each forward call sees all of the old ones or all of the new.

        Raises InputError for what is not a Matrix; FormatError, which names the tensor, for a scale or a weight that is not
        finite and for an array that was resized. What was there then stays.
        """
        cdef kt_given given[3]
        cdef kt_scan scans[3]
        cdef int error
        cdef kt_outcome outcome
        self._spec.check_expert(expert)
        memset(given, 0, sizeof(given))
        matrices, held = dict(matrices), []  # held: while it is, numpy does not resize it unless it is told not to count references
        for projection, matrix in matrices.items():
            self._spec.check(expert, projection, matrix)
        for projection, matrix in matrices.items():
            held.append(self._give(&given[self._names.index(projection)], self._names.index(projection), matrix))
        with nogil:
            kt_pool_lock()
            outcome = kt_experts_pack(&self.experts, expert, given, scans, &error)
            kt_pool_unlock()
        if outcome == KT_FAILED:
            _raise(error, f"packing {', '.join(matrix.name for matrix in matrices.values())}")
        self._check_outcome(outcome)
        if outcome == KT_INCOMPLETE:
            raise InputError(f"{self._spec.name}: {self._spec.one(expert)} is replaced by all of {self._names}, found {tuple(matrices)}")
        if outcome == KT_REFUSED:
            matrix = matrices[next(name for p, name in enumerate(self._names) if scans[p].refused)]
            matrix.refuse()
            raise FormatError(f"{matrix.name}: a scale, a weight or a bias was not finite while it was packed")
        if outcome == KT_TOO_MANY_FORMS:
            raise UnavailableError(f"{self._table.name}'s kernels take x in more forms than one layer can have: {KT_X_FORMS}")

    def replace(self, size_t expert, matrices):
        """Replace an expert's matrices, as pack() does for an expert that was packed."""
        self.pack(expert, matrices)

    cdef object _fill_slice(self, kt_slice *s, size_t projection, arrays, size_t first, size_t count):
        """Point a slice at arrays by name, for columns [first, first + count) of h. Returns what has to be unstaged then."""
        cdef uint8_t[::1] codes, numbers
        cdef _Fields fields = None
        weight_format = self._spec.formats[self._names[projection]]
        s.matrix = projection
        if projection == 2:
            s.rows, s.column, s.columns = self.experts.layer.hidden, first, count
        else:
            s.row, s.rows, s.columns = first, count, self.experts.layer.hidden
        expected = weight_format.arrays(s.rows, s.columns)
        views = {}
        for label, (dtype, shape) in expected.items():
            views[label] = _bytes(f"{self._names[projection]} {label}", arrays[label], dtype.itemsize * math.prod(shape))
        groups = {}
        codes = views["codes"]
        if _by_python(weight_format):
            groups["codes"] = dataclasses.replace(weight_format, order=ROWS).empty(s.rows, s.columns)["codes"]
            codes = groups["codes"].reshape(-1).view(np.uint8)
        s.codes = &codes[0]
        for i, (label, how) in enumerate(_group_arrays(weight_format)):
            if not how:
                continue
            dtype = np.dtype(np.uint8) if isinstance(how, ZeroPoint) else how.dtype if how.extent[0] == 1 else np.dtype(np.float32)
            groups[label] = np.empty(how.shape(s.rows, s.columns), dtype)
            numbers = groups[label].reshape(-1).view(np.uint8)
            s.groups[i] = &numbers[0]
        if self.experts.formats[projection].order.records.bytes:
            fields = _Fields(weight_format.order, groups)
            s.fields = &fields.fields
        return weight_format, views, groups, (s.rows, s.columns), fields

    def export(self, size_t expert, parts):
        """The checkpoint's own bytes again, in Matrix's dtypes: part i of `parts` gets the i-th rows of gate and up and the i-th
        columns of down. parts: [{projection: arrays by name}], C-contiguous arrays to write into, whose shapes are right.
        Returns {projection: bias, float32 [n]} of those matrices that have one.
        """
        cdef kt_slice *slices
        cdef kt_numbers numbers[3]
        cdef float[::1] bias, factor
        cdef int error
        cdef kt_outcome outcome
        cdef size_t i, p, num_slices = 0, count = self.experts.intermediate // len(parts)
        self._spec.check_expert(expert)
        memset(numbers, 0, sizeof(numbers))
        wanted = [(i, self._names.index(projection), arrays) for i, part in enumerate(parts) for projection, arrays in part.items()]
        biases, factors = {}, {}
        for p in {p for _, p, _ in wanted}:
            biases[p] = bias = np.empty(self._shape(p)[0], np.float32)
            factors[p] = factor = np.empty(self._shape(p)[0], np.float32)
            numbers[p].bias, numbers[p].factor = &bias[0], &factor[0]
        slices = <kt_slice *>calloc(max(1, len(wanted)), sizeof(kt_slice))
        if not slices:
            raise OutOfMemoryError(f"exporting {self._spec.one(expert)}: the system refused memory for {len(wanted)} slices")
        filled = []
        try:
            for i, p, arrays in wanted:
                filled.append(self._fill_slice(&slices[num_slices], p, arrays, i * count, count))
                num_slices += 1
            with nogil:
                kt_pool_lock()
                outcome = kt_experts_unpack(&self.experts, expert, slices, num_slices, numbers, &error)
                kt_pool_unlock()
        finally:
            free(slices)
        self._check_outcome(outcome)
        if outcome == KT_INCOMPLETE:
            raise InputError(f"{self._spec.name}: {self._spec.one(expert)} was not packed")
        if outcome == KT_FAILED:
            _raise(error, f"exporting {self._spec.one(expert)}")
        for (i, p, arrays), (weight_format, views, groups, shape, _) in zip(wanted, filled):
            for label, array in unstaged(weight_format, groups, shape[0], shape[1]).items():
                views[label][:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            if weight_format.factor:
                rows = slice(i * count, (i + 1) * count) if weight_format.factor.per_row and p < 2 else slice(None)
                views["factor"][:] = factors[p][rows][: views["factor"].size // 4].view(np.uint8)
        return {self._names[p]: array for p, array in biases.items() if numbers[p].has_bias}

    def packed_bytes(self, size_t expert, str projection, size_t shard=0, size_t first=0, most=None):
        """A copy of what a shard has of one matrix, packed, uint8 [panels, panel bytes]: of at most so many panels from the
        first one on, by default of all."""
        cdef size_t p = self._names.index(projection), n, k = self.experts.layer.hidden, panels
        cdef const kt_format *f = &self.experts.formats[p]
        cdef const uint8_t *data = NULL
        cdef kt_outcome outcome
        cdef uint8_t[:, ::1] to
        self._spec.check_expert(expert)
        n = self._columns[shard]
        if p == 2:
            n, k = k, n
        panels = (n + KT_PANEL - 1) // KT_PANEL
        panels -= min(first, panels)
        to = np.empty((panels if most is None else min(<size_t>most, panels), kt_panel_bytes(f, k)), np.uint8)
        with nogil:
            kt_pool_lock()
            outcome = self._state()
            if outcome == KT_DONE:
                data = kt_matrix_of(&self.experts, shard, expert, p).data
            if data and to.shape[0]:
                memcpy(&to[0, 0], data + first * to.shape[1], to.shape[0] * to.shape[1])
            kt_pool_unlock()
        self._check_outcome(outcome)
        if not data:
            raise InputError(f"{self._spec.name}: {projection} of {self._spec.one(expert)} was not packed")
        return np.asarray(to)

    cdef kt_outcome _state(self) noexcept nogil:
        """KT_DONE: what was packed can be touched. With the pool's lock held, and until it is let go."""
        if not self.experts.layer.shards:
            return KT_CLOSED
        return KT_DONE if kt_experts_intact(&self.experts) else KT_FILE_CHANGED

    cdef int _check_outcome(self, kt_outcome outcome) except -1:
        if outcome == KT_CLOSED:
            raise ClosedError(f"{self._spec.name} was closed")
        if outcome == KT_FILE_CHANGED:
            raise CacheError(f"{self._file}: expected the file as it was when it was mapped, found that it was changed since")
        return 0

    cdef int _check_whole(self, bint closed, size_t missing) except -1:
        if closed:
            raise ClosedError(f"{self._spec.name} was closed")
        if missing:
            raise InputError(f"{self._spec.name}: {missing} of its matrices were not packed")

    @property
    def rounding(self):
        """"folded" if any scaled weight is rounded to bfloat16, else "exact"."""
        cdef bint rounds[3]
        cdef bint rounded = False, closed
        cdef kt_matrix *matrix
        cdef size_t e, p
        for p, projection in enumerate(self._names):
            scale = self._spec.formats[projection].scale
            rounds[p] = scale is not None and scale.kind in ("bf16", "fp16")
        with nogil:
            kt_pool_lock()
            closed = self.experts.layer.shards == NULL
            for e in range(0 if closed else self.experts.layer.num_experts):
                for p in range(self.experts.matrices):
                    matrix = kt_matrix_of(&self.experts, 0, e, p)
                    rounded = rounded or (rounds[p] and matrix.data and matrix.kernel.folded == 1)
            kt_pool_unlock()
        self._check_whole(closed, 0)
        return "folded" if rounded else "exact"

    def read_seconds(self, KernelTable table, offset, nbytes, size_t streams=1):
        """Seconds in which all threads of the pool read that range of the packed weights: the read-bandwidth limit.

        Each shard's threads read that range of their own, in proportion. streams: 1, 2, 4 or 8 that each thread reads by turns.
        """
        cdef const uint8_t *at[KT_SHARDS_MAX]
        cdef size_t lengths[KT_SHARDS_MAX]
        cdef size_t begins[KT_SHARDS_MAX]
        cdef size_t i
        cdef double seconds = 0
        cdef kt_outcome outcome
        offset, nbytes = operator.index(offset), operator.index(nbytes)  # Python's integers do not wrap
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise InputError(f"range [{offset}, {offset + nbytes}) is not within the {self.nbytes} packed bytes")
        if streams not in (1, 2, 4, 8):  # a kernel table takes any other number for 1
            raise InputError(f"streams must be 1, 2, 4 or 8, found {streams}")
        for i, own in enumerate(self._shard_bytes):
            begins[i], lengths[i] = offset * own // self.nbytes, nbytes * own // self.nbytes
        with nogil:
            kt_pool_lock()
            outcome = self._state()
            if outcome == KT_DONE:
                for i in range(self.num_shards):
                    at[i] = self.experts.memory[i].arena + begins[i]
                seconds = kt_limit_read(table.isa.read, streams, self.experts.layer.placement, at, lengths)
            kt_pool_unlock()
        self._check_outcome(outcome)
        if seconds < 0:
            _raise(<int>-seconds, "measuring the read bandwidth")
        return seconds
