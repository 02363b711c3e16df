# The driver's lists and how it deals them, without a layer and without threads: for bench/simulation.

cdef class Teams:
    """Which threads serve which shard, as the pool deals them.

    domains: for each shard the physical cores of each of its L3 caches, such as [[8, 8], [8]]; no CPU need have them.
    threads: the caller's included.
    """

    cdef kt_teams teams
    cdef _Placement _placement  # teams points into it

    def __cinit__(self, domains, size_t threads):
        made_up = tuple(tuple((frozenset(range(cores)),) * 2 for cores in own) for own in domains)
        if not made_up or not all(own and all(cpus for cpus, _ in own) for own in made_up) or not 1 <= threads <= 4096:
            raise InputError(f"needs L3 caches with cores for each shard and 1 to 4096 threads, found {domains} and {threads}")
        self._placement = _Placement(made_up, threads, ())
        if kt_teams_make(&self.teams, &self._placement.placement, threads):
            raise OutOfMemoryError("the system refused memory for teams")

    def __dealloc__(self):
        kt_teams_free(&self.teams)

    @property
    def workers(self):
        """The number of threads."""
        return self.teams.workers

    @property
    def shards(self):
        """The number of shards."""
        return self.teams.shards

    @property
    def of(self):
        """[(first worker, workers, first group, groups)], for each shard."""
        teams = [self.teams.of[shard] for shard in range(self.teams.shards)]
        return [(team["first"], team["size"], team["first_group"], team["num_groups"]) for team in teams]

    @property
    def groups(self):
        """[(shard, first worker, workers)]: those of a shard that share an L3 cache."""
        return [(self.teams.groups[i].shard, self.teams.groups[i].first, self.teams.groups[i].size)
                for i in range(self.teams.num_groups)]


cdef class Schedule:
    """A forward call's items, as the driver cuts a routed batch for machines that need not exist.

    table, experts, plan, ranges: as PackedLayer takes them; no weight is read. The placement is that of the teams.
    ids: int64 [tokens, top_k]. A call computes chunks of at most `chunk` tokens, one after another: fill() makes the lists of one.
    """

    cdef kt_layer layer
    cdef kt_shard shards[KT_SHARDS_MAX]
    cdef kt_format formats[3]
    cdef kt_job job
    cdef Teams _teams  # the job points into it
    cdef KernelTable _table
    cdef int64_t[:, ::1] _ids
    cdef float[::1] _weights
    cdef uint8_t *_memory  # of route and lists
    cdef kt_hand *_hands   # [workers][shards][phases]
    cdef size_t _ranges, _nbytes
    cdef readonly size_t chunk
    cdef readonly size_t staged_bytes  # of x that the workers copy before phase A; 0: none, or the caller copies it alone

    def __cinit__(self, KernelTable table, experts, plan, ranges, Teams teams, ids):
        cdef kt_given kernels
        cdef kt_matrix matrix
        cdef kt_batch batch
        if <size_t>len(ranges) != teams.teams.shards:
            raise InputError(f"ranges: expected {teams.teams.shards}, one for each shard of the teams, found {len(ranges)}")
        self._teams, self._table = teams, table
        self._ids = np.array(ids, np.int64, order="C", ndmin=2)
        self._weights = np.zeros(max(1, self._ids.shape[0] * self._ids.shape[1]), np.float32)
        if not self._ids.shape[0] or not self._ids.shape[1]:
            raise InputError("ids: expected a token and an expert at least, found none")
        self.layer.num_experts, self.layer.hidden = experts.num_experts, experts.hidden
        self.layer.placement = &teams._placement.placement
        self.layer.shards = self.shards
        for p, projection in enumerate(PROJECTIONS):
            _fill_format(&self.formats[p], experts.formats[projection])
            table.find_both(experts.formats[projection], plan.activations, plan, &kernels)
            if not kernels.kernels[1] or not kt_layer_use(&self.layer, &matrix, p == 2, kernels.kernels[1]):
                raise UnavailableError(f"{table.name} has no kernel for {experts.formats[projection].description}")
        for i, (first, last) in enumerate(ranges):
            self.shards[i].intermediate = last - first
        memset(&batch, 0, sizeof(batch))
        batch.tokens, batch.top_k, batch.dtype = self._ids.shape[0], self._ids.shape[1], KT_BF16
        with nogil:
            kt_pool_lock()
            kt_job_begin(&self.job, &self.layer, &batch, &teams.teams)
            self.chunk = kt_scratch_chunk(&self.job)
            kt_pool_unlock()
        self._ranges = self.job.route.num_ranges
        self._nbytes = self._carve(NULL)
        self._memory = <uint8_t *>kt_os_map(self._nbytes)
        self._hands = <kt_hand *>calloc(teams.teams.workers * teams.teams.shards * KT_PHASES, sizeof(kt_hand))
        if not self._memory or not self._hands:
            raise OutOfMemoryError(f"the system refused {self._nbytes} bytes for lists")
        self._carve(self._memory)
        memset(self.job.route.active, 1, experts.num_experts)
        self.fill(0)

    def __dealloc__(self):
        kt_os_unmap(self._memory, self._nbytes)
        free(self._hands)

    cdef size_t _carve(self, uint8_t *base):
        cdef kt_carver c
        cdef size_t pieces = self.layer.num_experts * self._ranges
        c.base, c.used = base, 0
        kt_route_carve(&self.job.route, &c, self.layer.num_experts, self.chunk, self.job.batch.top_k, self._ranges)
        kt_schedule_carve(&self.job.schedule, &c, pieces, self._ranges, self.chunk * self.job.batch.top_k)
        return c.used

    def fill(self, size_t first):
        """Make the lists of the chunk whose first token that is; all their runs are to be taken again."""
        cdef kt_bool used[KT_X_FORMS]
        cdef size_t worker, shard, phase
        cdef kt_worker me
        if first >= <size_t>self._ids.shape[0]:
            raise InputError(f"first: expected a token, 0 to {self._ids.shape[0] - 1}, found {first}")
        self.job.batch.tokens = min(self.chunk, self._ids.shape[0] - first)
        self.job.batch.ids, self.job.batch.weights = &self._ids[first, 0], &self._weights[0]
        for i in range(KT_X_FORMS):
            used[i] = True
        with nogil:
            kt_pool_lock()
            kt_route_fill(&self.job.route, &self.job.batch, self.layer.num_experts, self._ranges)
            if self.job.route.num_slots:
                kt_schedule_fill(&self.job.schedule, &self.job.route)
            kt_job_stages(&self.job, used)
            kt_pool_unlock()
        if not self.job.route.num_slots:
            raise InputError("ids: expected an expert of the layer, found none")
        self.staged_bytes = self.job.staging.rows * self.job.k_hidden * sizeof(uint16_t)
        for worker in range(self._teams.teams.workers):
            me = self._worker(worker)
            for shard in range(self._teams.teams.shards):
                if kt_serves(&me, shard):
                    for phase in range(<size_t>KT_PHASES):
                        self._hand(worker, shard, phase)[0] = kt_hand_of(self._list(shard, phase), &me)

    cdef kt_worker _worker(self, size_t index):
        cdef kt_worker me
        me.index, me.group, me.teams = index, 0, &self._teams.teams
        while index >= self._teams.teams.groups[me.group].first + self._teams.teams.groups[me.group].size:
            me.group += 1
        return me

    cdef kt_hand *_hand(self, size_t worker, size_t shard, size_t phase) except NULL:
        if worker >= self._teams.teams.workers:
            raise InputError(f"worker: expected 0 to {self._teams.teams.workers - 1}, found {worker}")
        cdef kt_worker me = self._worker(worker)
        if not kt_serves(&me, shard):
            raise InputError(f"worker {worker} does not serve shard {shard}")
        return &self._hands[(worker * self._teams.teams.shards + shard) * KT_PHASES + phase]

    cdef const kt_list *_list(self, size_t shard, size_t phase) except NULL:
        if shard >= self._teams.teams.shards or phase >= KT_PHASES:
            raise InputError(f"expected a shard and phase 0 or 1, found {shard} and {phase}")
        return &self.job.schedule.shards[shard].of[phase]

    def take(self, size_t worker, size_t shard, size_t phase):
        """The next run of a worker, (first item, the one after the last); None: there is none. phase: 0 is A, 1 is B."""
        cdef const kt_list *found = self._list(shard, phase)
        cdef kt_run run = kt_list_take(found, self._hand(worker, shard, phase))
        return (run.first, run.end) if run.first < run.end else None

    def rounds_left(self, size_t worker, size_t shard, size_t phase):
        """Rounds of which a worker's group has runs left, or the group that it would take from."""
        cdef const kt_list *found = self._list(shard, phase)
        return kt_list_rounds_left(found, self._hand(worker, shard, phase))

    def together(self, size_t shard, size_t phase, size_t item, size_t end):
        """Items of a run up to `end` that are computed together, from `item` on."""
        self._list(shard, phase)
        return kt_items_together(&self.job.schedule, shard, <kt_phase>phase, item, end)

    def per_strip(self, size_t shard, size_t phase):
        """Items of a strip, or of a range where phase B is by panel: item i is number i % per_strip of i // per_strip."""
        return self._list(shard, phase).per_strip

    def items(self, size_t shard, size_t phase):
        """Items of a phase in a shard."""
        return kt_list_items(self._list(shard, phase))

    def halves(self, size_t shard):
        """Whether phase A's items are single panels of gate or up, instead of a panel of both."""
        self._list(shard, 0)
        return bool(self.job.schedule.shards[shard].halves)

    @property
    def by_panel(self):
        """Whether phase B's items are a range of tokens and a panel of y, instead of a strip and a panel."""
        return bool(self.job.schedule.by_panel)

    @property
    def strips(self):
        """The strips, int64 [strips, 2]: piece, rows."""
        return np.array([(self.job.schedule.strips[i].piece, self.job.schedule.strips[i].rows)
                         for i in range(self.job.schedule.num_strips)], np.int64).reshape(-1, 2)

    @property
    def strip_slots(self):
        """The first slot of each strip; slots are sorted by piece."""
        return [self.job.schedule.strips[i].first for i in range(self.job.schedule.num_strips)]

    @property
    def pieces(self):
        """The pieces, int64 [pieces, 2]: expert, rows."""
        return np.array([(self.job.route.pieces[i].expert, self.job.route.pieces[i].count)
                         for i in range(self.job.route.num_pieces)], np.int64).reshape(-1, 2)

    @property
    def ranges(self):
        """[(tokens, first piece, pieces)] of each range of tokens."""
        return [(r["end"] - r["first"], r["first_piece"], r["num_pieces"])
                for r in [self.job.route.ranges[i] for i in range(self.job.route.num_ranges)]]

    @property
    def tokens(self):
        """Tokens of this chunk."""
        return self.job.batch.tokens

    @property
    def slots(self):
        """Pairs of a token and an expert, of this chunk."""
        return self.job.route.num_slots

    def panel_bytes(self, size_t shard):
        """Packed bytes of a panel of gate and up together, and of one of down."""
        cdef const kt_format *f = self.formats
        cdef size_t k = self.job.k_hidden
        self._list(shard, 0)
        return kt_panel_bytes(&f[0], k) + kt_panel_bytes(&f[1], k), kt_panel_bytes(&f[2], self.job.shards[shard].k_inter)


def call_rows(size_t rows):
    """The rows of each kernel call by which so many rows of an expert are multiplied."""
    cdef size_t call
    calls = []
    while rows:
        call = kt_call_rows(rows)
        calls.append(call)
        rows -= call
    return calls
