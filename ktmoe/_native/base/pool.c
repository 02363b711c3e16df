/* A small thread pool: wake-up in microseconds, a bounded spin before sleeping, sound after fork.
 *
 * All workers take part in every task, so a task is published by one counter (epoch) and finished by another
 * (finished); both are words that a waiter first spins on and then sleeps on. The number of threads changes only
 * between tasks, by stopping all workers and starting the new number.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "base/cpu.h"
#include "base/pool.h"

/* A counter that threads wait on. sleepers tells the other side whether a system call is needed to wake them. */
typedef struct event {
    _Alignas(64) _Atomic uint32_t value;
    _Atomic uint32_t sleepers;
} event;

static struct pool {
    event epoch;    /* bumped to publish a task, or to stop */
    event finished; /* bumped by the last worker of a task */
    _Alignas(64) _Atomic size_t running;
    struct barrier {
        event passed; /* bumped by the last to arrive */
        _Alignas(64) _Atomic size_t arrived;
    } barriers[KT_SHARDS_MAX]; /* of the shards' teams */
    _Alignas(64) kt_task task; /* NULL: stop */
    void *context;
    const kt_placement *placement; /* what the workers were started for */
    kt_cpus cpus;                  /* their CPUs if that is NULL: not those that the first caller happened to be kept to */
    bool cpus_known;
    size_t workers; /* threads, the caller's included; 0 before the first run and after fork */
    pthread_t *threads;
    _Atomic uint64_t spin_ns; /* idle workers may be reading it */
} pool;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t wanted_threads = 1; /* under lock, as everything below */
static bool threads_chosen;
static uint64_t wanted_spin_ns;

/* By this symbol threadpoolctl tells this library from others of its file name (ktmoe/machine/threads.py). */
__attribute__((visibility("default"))) const int ktmoe_threadpool = 1;

static void wait_change(event *e, uint32_t old) {
    enum { POLL = 64 }; /* polls between looks at the clock */
    const uint64_t spin_ns = atomic_load_explicit(&pool.spin_ns, memory_order_relaxed);
    if (spin_ns) {
        const uint64_t start = kt_os_nanoseconds();
        do {
            for (int i = 0; i < POLL; i++) {
                if (atomic_load_explicit(&e->value, memory_order_acquire) != old) return;
                kt_cpu_relax();
            }
        } while (kt_os_nanoseconds() - start < spin_ns);
    }
    atomic_fetch_add(&e->sleepers, 1);
    while (atomic_load(&e->value) == old) kt_os_wait(&e->value, old);
    atomic_fetch_sub(&e->sleepers, 1);
}

static void bump(event *e) {
    atomic_fetch_add(&e->value, 1);
    if (atomic_load(&e->sleepers)) kt_os_wake(&e->value);
}

static void run_task(size_t worker) {
    const unsigned state = kt_fp_enter();
    pool.task(pool.context, worker, pool.workers);
    kt_fp_leave(state);
}

typedef struct start {
    size_t worker;
    uint32_t epoch;
} start;

static void *work(void *argument) {
    const start s = *(start *)argument;
    free(argument);
    const kt_cpus *everywhere = pool.cpus_known ? &pool.cpus : NULL;
    const kt_cpus *cpus = pool.placement ? &pool.placement->cpus[s.worker % pool.placement->shards] : everywhere;
    if (cpus) kt_os_bind(cpus, NULL);
    for (uint32_t seen = s.epoch;; seen++) {
        wait_change(&pool.epoch, seen);
        if (!pool.task) return NULL;
        run_task(s.worker);
        if (atomic_fetch_sub(&pool.running, 1) == 1) bump(&pool.finished);
    }
}

void kt_pool_stop(void) {
    if (pool.workers > 1) {
        pool.task = NULL;
        bump(&pool.epoch);
        for (size_t i = 1; i < pool.workers; i++) pthread_join(pool.threads[i], NULL);
    }
    free(pool.threads);
    pool.threads = NULL;
    pool.workers = 0;
}

/* Fork waits for the running task, so that the child gets the driver's memory in order. The child has only the thread that
 * forked: it forgets the workers. */
static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork_parent(void) { pthread_mutex_unlock(&lock); }
static void after_fork_child(void) {
    pool = (struct pool){0};
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

/* Before there is anything to lock, since another thread may fork at any time. */
__attribute__((constructor)) static void handle_forks(void) {
    pthread_atfork(before_fork, after_fork_parent, after_fork_child);
}

static int start_workers(size_t threads) {
    pool.threads = calloc(threads, sizeof *pool.threads);
    if (!pool.threads) return ENOMEM;
    pool.cpus_known = kt_os_process_cpus(&pool.cpus);
    /* Signals are the interpreter's; only the ones that a worker's own instructions raise stay with it. */
    sigset_t block, old;
    sigfillset(&block);
    sigdelset(&block, SIGILL);
    sigdelset(&block, SIGSEGV);
    sigdelset(&block, SIGBUS);
    sigdelset(&block, SIGFPE);
    sigdelset(&block, SIGTRAP);
    pthread_sigmask(SIG_SETMASK, &block, &old);
    int error = 0;
    for (pool.workers = 1; pool.workers < threads; pool.workers++) {
        start *s = malloc(sizeof *s);
        if (!s) {
            error = ENOMEM;
            break;
        }
        *s = (start){pool.workers, atomic_load(&pool.epoch.value)};
        error = pthread_create(&pool.threads[pool.workers], NULL, work, s);
        if (error) {
            free(s);
            break;
        }
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (error) kt_pool_stop();
    return error;
}

void kt_pool_lock(void) { pthread_mutex_lock(&lock); }
void kt_pool_unlock(void) { pthread_mutex_unlock(&lock); }

void kt_pool_configure(size_t threads, bool chosen, uint64_t spin_ns) {
    kt_pool_lock();
    wanted_threads = threads;
    threads_chosen = chosen;
    wanted_spin_ns = spin_ns;
    kt_pool_unlock();
}

size_t kt_pool_width(const kt_placement *placement) {
    return placement && !threads_chosen ? placement->threads : wanted_threads;
}

size_t kt_pool_threads(void) {
    kt_pool_lock();
    const size_t threads = wanted_threads;
    kt_pool_unlock();
    return threads;
}

int kt_pool_run(kt_task task, void *context, const kt_placement *placement) {
    const size_t width = kt_pool_width(placement);
    if (pool.workers != width || pool.placement != placement) {
        kt_pool_stop();
        pool.placement = placement;
        const int error = start_workers(width);
        if (error) return error;
    }
    pool.spin_ns = placement && width > placement->num_cpus ? 0 : wanted_spin_ns;
    pool.task = task;
    pool.context = context;
    /* The caller's thread is the user's: it is kept to the first shard's CPUs for this run only. */
    kt_cpus before;
    const bool bound = placement && kt_os_bind(&placement->cpus[0], &before);
    const uint32_t finished = atomic_load(&pool.finished.value);
    atomic_store(&pool.running, pool.workers - 1);
    if (pool.workers > 1) bump(&pool.epoch);
    run_task(0);
    if (pool.workers > 1) wait_change(&pool.finished, finished);
    if (bound) kt_os_bind(&before, NULL);
    return 0;
}

void kt_pool_barrier(kt_team team) {
    if (team.size == 1) return;
    struct barrier *b = &pool.barriers[team.shard];
    const uint32_t passed = atomic_load(&b->passed.value);
    if (atomic_fetch_add(&b->arrived, 1) + 1 == team.size) {
        atomic_store(&b->arrived, 0);
        bump(&b->passed);
    } else {
        wait_change(&b->passed, passed);
    }
}
