# The pool: its threads, how late one knows what another did, its scratch memory. Captured calls without a graph.


def pool_threads():
    """What configure_pool last said."""
    cdef size_t threads
    with nogil:
        threads = kt_pool_threads()
    return threads


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


def scratch_bytes():
    """Bytes of scratch memory that the runtime holds, for all layers together."""
    cdef size_t held
    with nogil:
        kt_pool_lock()
        held = kt_moe_scratch_bytes() + kt_backward_scratch_bytes()
        kt_pool_unlock()
    return held


def scratch_at():
    """[(shard, address, bytes)] of the scratch memory that each shard's own threads use, of forward and of backward passes."""
    cdef kt_arenas of[2]
    cdef size_t i, s
    with nogil:
        kt_pool_lock()
        of[0], of[1] = kt_forward_arenas()[0], kt_backward_arenas()[0]
        kt_pool_unlock()
    return [(s, <size_t>of[i].of[s].base, of[i].of[s].bytes)
            for i in range(2) for s in range(<size_t>KT_SHARDS_MAX) if of[i].of[s].base]


def submit_captured(size_t address):
    """What submit_function does; for those who replay by hand."""
    with nogil:
        kt_queue_submit(<void *>address)


def await_captured(size_t address):
    """What await_function does."""
    with nogil:
        kt_queue_await(<void *>address)
