# Where shards are, and which of the pool's threads serve them.

cdef dict _placements = {}  # (domains of each shard, threads) -> _Placement; kept for good, since pointers tell them apart


cdef class _Placement:
    """domains: for each shard those of its node, ktmoe.machine.topology.Domain. threads: unless the user chose a number."""

    cdef kt_placement placement

    def __cinit__(self, domains, size_t threads):
        cdef kt_domain *domain
        if len(domains) > KT_SHARDS_MAX:
            raise InputError(f"a layer can be on at most {KT_SHARDS_MAX} NUMA nodes, found {len(domains)}")
        self.placement.shards, self.placement.threads = len(domains), threads
        self.placement.num_cpus = len(frozenset().union(*[cpus for own in domains for cpus, _ in own]))
        self.placement.domains = domain = <kt_domain *>calloc(sum(map(len, domains)), sizeof(kt_domain))
        if not domain:
            raise OutOfMemoryError("the system refused memory for a placement")
        for shard, own in enumerate(domains):
            for cpus, one_a_core in own:
                domain.shard, domain.cores = shard, len(one_a_core)
                _fill_cpus(&domain.cpus, cpus)
                _fill_cpus(&domain.one_a_core, one_a_core)
                domain += 1
        self.placement.num_domains = domain - self.placement.domains

    def __dealloc__(self):
        free(self.placement.domains)


cdef _fill_cpus(kt_cpus *cpus, numbers):
    for cpu in numbers:
        if cpu < 64 * KT_CPU_WORDS:
            cpus.words[cpu // 64] |= <uint64_t>1 << (cpu % 64)


cdef const kt_placement *_placed(domains, size_t threads) except NULL:
    key = (domains, threads)
    if key not in _placements:
        _placements.setdefault(key, _Placement(domains, threads))  # another thread may have been faster: its pointer is in use
    return &(<_Placement>_placements[key]).placement


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
        self._placement = _Placement(made_up, threads)
        if kt_teams_make(&self.teams, &self._placement.placement, threads):
            raise OutOfMemoryError("the system refused memory for teams")

    def __dealloc__(self):
        kt_teams_free(&self.teams)

    @property
    def workers(self):
        """Threads."""
        return self.teams.workers

    @property
    def shards(self):
        """How many."""
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
