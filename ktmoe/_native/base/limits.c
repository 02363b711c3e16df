/* Measures, with the pool's own threads, the machine's limits, which benchmarks divide by, and the pool's latencies. */
#include <errno.h>
#include <stdatomic.h>

#include "base/cpu.h"
#include "base/limits.h"
#include "base/pool.h"

typedef struct limit_job {
    void (*read)(const void *, size_t, size_t);
    size_t streams;
    double (*peak)(size_t);
    size_t shards;
    const uint8_t *const *p; /* [shards] */
    const size_t *bytes;     /* [shards] */
    struct next {
        _Alignas(64) _Atomic size_t byte;
    } next[KT_SHARDS_MAX];
    size_t iterations;
    _Atomic uint64_t flops;
} limit_job;

static void read_all(void *context, const kt_worker *me) {
    enum { RUN = 1 << 20 }; /* bytes at a time: of eight streams, each has a panel's order of magnitude */
    limit_job *j = context;
    for (size_t shard = 0; shard < j->shards; shard++)
        for (size_t at; kt_serves(me, shard) && (at = atomic_fetch_add(&j->next[shard].byte, RUN)) < j->bytes[shard];)
            j->read(j->p[shard] + at, j->bytes[shard] - at < RUN ? j->bytes[shard] - at : RUN, j->streams);
}

static void multiply_all(void *context, const kt_worker *me) {
    (void)me;
    limit_job *j = context;
    atomic_fetch_add(&j->flops, (uint64_t)j->peak(j->iterations));
}

static double timed(kt_task task, limit_job *j, const kt_placement *placement) {
    const uint64_t start = kt_os_nanoseconds();
    const int error = kt_pool_run(task, j, placement);
    const uint64_t end = kt_os_nanoseconds();
    return error ? -(double)error : (double)(end - start) * 1e-9;
}

double kt_limit_read(void (*read)(const void *, size_t, size_t), size_t streams, const kt_placement *placement,
                     const uint8_t *const *p, const size_t *bytes) {
    limit_job j = {.read = read, .streams = streams, .shards = kt_shards_of(placement), .p = p, .bytes = bytes};
    return timed(read_all, &j, placement);
}

double kt_limit_peak(double (*peak)(size_t), size_t iterations, double *flops) {
    limit_job j = {.peak = peak, .iterations = iterations};
    kt_pool_lock();
    const double seconds = timed(multiply_all, &j, NULL);
    kt_pool_unlock();
    *flops = (double)j.flops;
    return seconds;
}

typedef struct latency_job {
    _Alignas(64) _Atomic size_t ball;   /* handoffs so far; even: worker 0 has it, odd: worker 1 */
    _Alignas(64) _Atomic uint64_t last; /* when the last worker began */
    size_t count;                       /* of barriers, or of handoffs */
    uint64_t took;                      /* worker 0's nanoseconds for all of them */
} latency_job;

static void begin(void *context, const kt_worker *me) {
    (void)me;
    latency_job *j = context;
    const uint64_t now = kt_os_nanoseconds();
    uint64_t last = atomic_load(&j->last);
    while (last < now && !atomic_compare_exchange_weak(&j->last, &last, now)) {
    }
}

static void pass_barriers(void *context, const kt_worker *me) {
    latency_job *j = context;
    kt_pool_barrier(me);
    const uint64_t start = kt_os_nanoseconds();
    for (size_t i = 0; i < j->count; i++) kt_pool_barrier(me);
    if (me->index == 0) j->took = kt_os_nanoseconds() - start;
}

static void play(void *context, const kt_worker *me) {
    latency_job *j = context;
    kt_pool_barrier(me);
    const uint64_t start = kt_os_nanoseconds();
    for (size_t turn = me->index; me->index < 2 && turn < j->count; turn += 2) {
        while (atomic_load_explicit(&j->ball, memory_order_acquire) != turn) kt_cpu_relax();
        atomic_store_explicit(&j->ball, turn + 1, memory_order_release);
    }
    if (me->index == 0) j->took = kt_os_nanoseconds() - start;
}

/* Seconds of one of count; needs so many workers, or else it would wait for ever. */
static double each(kt_task task, size_t workers, size_t count) {
    latency_job j = {.count = count};
    kt_pool_lock();
    const kt_teams *teams = kt_pool_teams(NULL);
    const int error = !teams ? ENOMEM : teams->workers < workers ? EINVAL : kt_pool_run(task, &j, NULL);
    kt_pool_unlock();
    return error ? -(double)error : (double)j.took * 1e-9 / (double)count;
}

double kt_latency_barrier(size_t count) { return each(pass_barriers, 1, count); }
double kt_latency_handoff(size_t count) { return each(play, 2, 2 * count); } /* back and forth: the last one is seen */

double kt_latency_wake(uint64_t idle_ns) {
    latency_job before = {0}, j = {0};
    kt_pool_lock();
    int error = kt_pool_run(begin, &before, NULL); /* the workers' idle time begins */
    uint64_t start = kt_os_nanoseconds();
    for (const uint64_t end = start + idle_ns; start < end; start = kt_os_nanoseconds()) kt_cpu_relax();
    if (!error) error = kt_pool_run(begin, &j, NULL);
    kt_pool_unlock();
    return error ? -(double)error : (double)(j.last - start) * 1e-9;
}
