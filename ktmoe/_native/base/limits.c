/* Measures, with the pool's own threads, the machine's limits, which benchmarks divide by, and the pool's latencies. */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "base/cpu.h"
#include "base/gate.h"
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
    kt_gate missing; /* workers */
} limit_job;

/* A task that is about each worker, not about work, waits for all of them. */
static void meet(kt_gate *missing, const kt_worker *me) {
    kt_gate_pass(missing, 1);
    if (me->index == 0) kt_gate_wait(missing);
}

static void read_all(void *context, const kt_worker *me) {
    enum { RUN = 1 << 20 }; /* bytes at a time: of eight streams, each has a panel's order of magnitude */
    limit_job *j = context;
    for (size_t shard = 0; shard < j->shards; shard++)
        for (size_t at; kt_serves(me, shard) && (at = atomic_fetch_add(&j->next[shard].byte, RUN)) < j->bytes[shard];)
            j->read(j->p[shard] + at, j->bytes[shard] - at < RUN ? j->bytes[shard] - at : RUN, j->streams);
}

static void multiply_all(void *context, const kt_worker *me) {
    limit_job *j = context;
    atomic_fetch_add(&j->flops, (uint64_t)j->peak(j->iterations));
    meet(&j->missing, me);
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
    const kt_teams *teams = kt_pool_teams(NULL);
    if (teams) kt_gate_close(&j.missing, (uint32_t)teams->workers);
    const double seconds = teams ? timed(multiply_all, &j, NULL) : -(double)ENOMEM;
    kt_pool_unlock();
    *flops = (double)j.flops;
    return seconds;
}

typedef struct latency_job {
    _Alignas(64) _Atomic size_t ball;   /* handoffs so far; even: worker 0 has it, odd: worker 1 */
    _Alignas(64) _Atomic uint64_t last; /* when the last worker began */
    size_t count;                       /* of gates, or of handoffs */
    uint64_t took;                      /* worker 0's nanoseconds for all of them */
    kt_gate *gates;                     /* [count + 1], each for all workers */
} latency_job;

static void begin(void *context, const kt_worker *me) {
    latency_job *j = context;
    const uint64_t now = kt_os_nanoseconds();
    uint64_t last = atomic_load(&j->last);
    while (last < now && !atomic_compare_exchange_weak(&j->last, &last, now)) {
    }
    meet(&j->gates[0], me);
}

static void pass_gates(void *context, const kt_worker *me) {
    latency_job *j = context;
    uint64_t start = 0;
    for (size_t i = 0; i <= j->count; i++) {
        kt_gate_pass(&j->gates[i], 1);
        kt_gate_wait(&j->gates[i]);
        if (!i) start = kt_os_nanoseconds();
    }
    if (me->index == 0) j->took = kt_os_nanoseconds() - start;
}

static void play(void *context, const kt_worker *me) {
    latency_job *j = context;
    kt_gate_pass(&j->gates[0], 1);
    kt_gate_wait(&j->gates[0]);
    const uint64_t start = kt_os_nanoseconds();
    for (size_t turn = me->index; me->index < 2 && turn < j->count; turn += 2) {
        while (atomic_load_explicit(&j->ball, memory_order_acquire) != turn) kt_cpu_relax();
        atomic_store_explicit(&j->ball, turn + 1, memory_order_release);
    }
    if (me->index == 0) j->took = kt_os_nanoseconds() - start;
}

/* Runs a task with so many gates that all workers pass; the caller holds the pool's lock. Returns 0 or an errno, as
 * kt_pool_run(). */
static int run(kt_task task, latency_job *j, size_t gates) {
    const kt_teams *teams = kt_pool_teams(NULL);
    j->gates = teams ? aligned_alloc(_Alignof(kt_gate), gates * sizeof *j->gates) : NULL;
    if (!j->gates) return ENOMEM;
    for (size_t i = 0; i < gates; i++) kt_gate_close(&j->gates[i], (uint32_t)teams->workers);
    const int error = kt_pool_run(task, j, NULL);
    free(j->gates);
    return error;
}

double kt_latency_gate(size_t count) {
    latency_job j = {.count = count};
    kt_pool_lock();
    const int error = run(pass_gates, &j, count + 1);
    kt_pool_unlock();
    return error ? -(double)error : (double)j.took * 1e-9 / (double)count;
}

double kt_latency_handoff(size_t count) {
    latency_job j = {.count = 2 * count}; /* back and forth: the last one is seen */
    kt_pool_lock();
    const kt_teams *teams = kt_pool_teams(NULL);
    const int error = !teams ? ENOMEM : teams->workers < 2 ? EINVAL : run(play, &j, 1); /* one alone would wait for ever */
    kt_pool_unlock();
    return error ? -(double)error : (double)j.took * 1e-9 / (double)j.count;
}

double kt_latency_wake(uint64_t idle_ns) {
    latency_job before = {0}, j = {0};
    kt_pool_lock();
    int error = run(begin, &before, 1); /* the workers' idle time begins */
    uint64_t start = kt_os_nanoseconds();
    for (const uint64_t end = start + idle_ns; start < end; start = kt_os_nanoseconds()) kt_cpu_relax();
    if (!error) error = run(begin, &j, 1);
    kt_pool_unlock();
    return error ? -(double)error : (double)(j.last - start) * 1e-9;
}
