# The pool: how many threads, how they wait, how fast they are.


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
        kt_backward_release()
        kt_pool_stop()
        kt_pool_unlock()


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
    """Set fields of kt_tuning (forward/tuning.h); returns all fields as they were. None of them changes a bit of any result."""
    cdef kt_tuning before, tuning
    cdef bint changed = True  # by another thread meanwhile
    while changed:
        with nogil:
            kt_pool_lock()
            memcpy(&before, &kt_moe_tuning, sizeof(before))
            kt_pool_unlock()
        old = dict(before)
        unknown = settings.keys() - old.keys()
        if unknown:
            raise InputError(f"unknown tuning {sorted(unknown)}; known are {sorted(old)}")
        tuning = {**old, **settings}
        with nogil:
            kt_pool_lock()
            changed = memcmp(&before, &kt_moe_tuning, sizeof(before)) != 0
            if not changed:
                memcpy(&kt_moe_tuning, &tuning, sizeof(tuning))
            kt_pool_unlock()
    return old
