# The pool: how many threads, how they wait, where they run.

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


def configure_pool(size_t threads, bint chosen, uint64_t spin_us, domains):
    """Threads, the caller's included, and how long idle ones spin before they sleep; from the next run on.

    chosen: the user said how many, which counts for layers on NUMA nodes, too. domains: where layers run that are on none, as
    one shard's.
    """
    cdef const kt_placement *everywhere = _placed(domains, 1)  # its threads are those that were given
    with nogil:
        kt_pool_configure(threads, chosen, spin_us * 1000, everywhere)


def release():
    """Give the scratch memory back and end the idle threads; the next call makes others."""
    with nogil:
        kt_pool_lock()
        kt_moe_release()
        kt_pool_stop()
        kt_pool_unlock()


def pool_threads():
    """What configure_pool last said."""
    cdef size_t threads
    with nogil:
        threads = kt_pool_threads()
    return threads


def usable_cpus():
    """Logical CPUs that this process may run on: those of its first thread. Waits for the running task, which may keep it elsewhere."""
    cdef kt_cpus cpus
    cdef bint known
    cdef size_t cpu
    with nogil:
        kt_pool_lock()
        known = kt_os_process_cpus(&cpus)
        kt_pool_unlock()
    if not known:  # more CPUs than the driver counts
        return os.sched_getaffinity(os.getpid())
    found = set()
    for cpu in range(<size_t>64 * KT_CPU_WORDS):
        if cpus.words[cpu // 64] >> (cpu % 64) & 1:
            found.add(cpu)
    return found


def tune(**settings):
    """Set fields of kt_tuning (forward/forward.h); returns all fields as they were. None of them changes a bit of any result."""
    cdef kt_tuning tuning
    with nogil:
        kt_pool_lock()
        tuning = kt_moe_tuning
        kt_pool_unlock()
    old = dict(tuning)
    unknown = settings.keys() - old.keys()
    if unknown:
        raise InputError(f"unknown tuning {sorted(unknown)}; known are {sorted(old)}")
    tuning = {**old, **settings}
    with nogil:
        kt_pool_lock()
        memcpy(&kt_moe_tuning, &tuning, sizeof(tuning))
        kt_pool_unlock()
    return old


def scratch_bytes():
    """Bytes of scratch memory that the runtime holds, for all layers together."""
    cdef size_t held
    with nogil:
        kt_pool_lock()
        held = kt_moe_scratch_bytes()
        kt_pool_unlock()
    return held


def pool_wake(uint64_t idle_us):
    """Seconds from handing the pool a task to its last thread's beginning, the threads having been idle for idle_us."""
    cdef double seconds
    with nogil:
        seconds = kt_latency_wake(idle_us * 1000)
    return _latency(seconds)


def pool_gate(size_t count):
    """Seconds of a gate that all threads pass and wait at, the mean of count."""
    cdef double seconds
    _at_least_one(count)
    with nogil:
        seconds = kt_latency_gate(count)
    return _latency(seconds)


def pool_handoff(size_t count):
    """Seconds in which one thread sees what another one wrote, the mean of 2 * count: no wake-up and no gate can be faster.

    Raises InputError where the pool has one thread.
    """
    cdef double seconds
    _at_least_one(count)
    with nogil:
        seconds = kt_latency_handoff(count)
    if seconds == -errno.EINVAL:
        raise InputError("a handoff needs 2 threads or more, the pool has 1; see ktmoe.set_num_threads")
    return _latency(seconds)


cdef _at_least_one(size_t count):
    if count < 1:
        raise InputError("count must be at least 1, found 0")


cdef double _latency(double seconds) except *:
    if seconds < 0:
        _raise(<int>-seconds, "measuring the pool's latency")
    return seconds
