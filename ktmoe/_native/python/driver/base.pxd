# base/: the operating system, the CPU, the pool, limits. What is in driver/ is for core.pyx alone.
from libc.stdint cimport uint8_t, uint64_t


cdef extern from "stdbool.h":
    ctypedef bint kt_bool "bool"


cdef extern from "base/cpu.h" nogil:
    ctypedef struct kt_cpu_feature:
        const char *name
        bint present
    const kt_cpu_feature *kt_cpu_features(size_t *count)
    unsigned kt_fp_enter()
    void kt_fp_leave(unsigned state)


cdef extern from "base/os.h" nogil:
    enum:
        KT_CPU_WORDS
    ctypedef struct kt_cpus:
        uint64_t words[64]
    bint kt_os_process_cpus(kt_cpus *cpus)
    ctypedef struct kt_file_state:
        uint64_t bytes, seconds, nanoseconds
    bint kt_os_file_state(int fd, kt_file_state *state)
    int kt_os_hold(int fd)
    void kt_os_let_go(int fd)
    enum:
        KT_PAGE_BYTES
        KT_HUGE_BYTES
    int kt_os_permit_tiles()


cdef extern from "base/placement.h" nogil:
    enum:
        KT_SHARDS_MAX
    ctypedef struct kt_domain:
        size_t shard, cores
        kt_cpus cpus, one_a_core
    ctypedef struct kt_placement:
        size_t shards, threads, num_cpus, num_domains
        kt_domain *domains
        int nodes[32]


cdef extern from "base/pool.h" nogil:
    void kt_pool_lock()
    void kt_pool_unlock()
    void kt_pool_configure(size_t threads, bint chosen, uint64_t spin_ns, const kt_placement *everywhere)
    size_t kt_pool_threads()
    void kt_pool_stop()


cdef extern from "base/limits.h" nogil:
    double kt_limit_read(void (*read)(const void *, size_t, size_t) nogil, size_t streams, const kt_placement *placement,
                         const uint8_t *const *p, const size_t *nbytes)
    double kt_limit_peak(double (*peak)(size_t) nogil, size_t iterations, double *flops)
