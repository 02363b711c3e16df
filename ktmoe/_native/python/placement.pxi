# Where shards are, and which of the pool's threads serve them.

cdef dict _placements = {}  # (domains of each shard, threads, nodes) -> _Placement; kept for good, since pointers tell them apart


cdef class _Placement:
    """domains: for each shard those of its node, ktmoe.machine.topology.Domain. threads: unless the user chose a number.
    nodes: of each shard the number; none where nothing is bound to nodes."""

    cdef kt_placement placement

    def __cinit__(self, domains, size_t threads, nodes):
        cdef kt_domain *domain
        if len(domains) > KT_SHARDS_MAX:
            raise InputError(f"a layer can be on at most {KT_SHARDS_MAX} NUMA nodes, found {len(domains)}")
        self.placement.shards, self.placement.threads = len(domains), threads
        for shard in range(<size_t>KT_SHARDS_MAX):
            self.placement.nodes[shard] = nodes[shard] if shard < <size_t>len(nodes) else -1
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


cdef const kt_placement *_placed(domains, size_t threads, tuple nodes=()) except NULL:
    key = (domains, threads, nodes)
    if key not in _placements:
        _placements.setdefault(key, _Placement(*key))  # another thread may have been faster: its pointer is in use
    return &(<_Placement>_placements[key]).placement
