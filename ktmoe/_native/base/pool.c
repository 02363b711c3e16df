/* A small thread pool: wake-up in microseconds, a bounded spin before sleeping, sound after fork.
 *
 * All workers take part in every task. They begin it, meet in it and end it as a tree: by the lines of their group, and once for
 * the group by the lines of all groups. So no cache line is waited for by more than a group, or by one of each group. The number
 * of threads changes only between tasks, by stopping all workers and starting the new number.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "base/cpu.h"
#include "base/event.h"
#include "base/pool.h"

/* What the workers of a group meet at, or the groups themselves. */
typedef struct meeting {
    _Alignas(64) kt_event epoch; /* bumped for a task, or to stop */
    kt_task task;                /* NULL: stop */
    void *context;
    _Alignas(64) kt_event passed; /* bumped when all have arrived at a barrier */
    _Alignas(64) _Atomic size_t arrived;
    _Alignas(64) _Atomic size_t ended; /* their task; worker 0 is not counted */
} meeting;

typedef struct thread {
    kt_worker worker;
    pthread_t id; /* worker 0 has none */
} thread;

static struct pool {
    meeting all; /* of the groups */
    _Alignas(64) kt_event finished;
    _Alignas(64) kt_teams teams;   /* no workers: to be made */
    const kt_placement *placement; /* that they were made for */
    bool bound;                    /* all workers to that placement's CPUs */
    kt_cpus cpus;                  /* the process's, if not: not those that the first caller happened to be kept to */
    bool cpus_known;
    size_t started; /* threads, the caller's included; 0 before the first run and after fork */
    thread *threads;
    meeting *groups;
} pool;

static kt_domain one_domain = {.cores = 1};
static const kt_placement one_place = {.shards = 1, .threads = 1, .num_domains = 1, .domains = &one_domain};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t wanted_threads = 1; /* under lock, as everything below */
static bool threads_chosen;
static uint64_t wanted_spin_ns;
static const kt_placement *everywhere = &one_place;

/* By this symbol threadpoolctl tells this library from others of its file name (ktmoe/machine/threads.py). */
__attribute__((visibility("default"))) const int ktmoe_threadpool = 1;

/* The last of `size` that come resets the count for the next time. */
static bool is_last(_Atomic size_t *count, size_t size) {
    if (atomic_fetch_add(count, 1) + 1 < size) return false;
    atomic_store_explicit(count, 0, memory_order_relaxed);
    return true;
}

static void run_task(kt_task task, void *context, const kt_worker *me) {
    const unsigned state = kt_fp_enter();
    task(context, me);
    kt_fp_leave(state);
}

static void end_task(const kt_worker *me) {
    const kt_teams *t = me->teams;
    if (!is_last(&pool.groups[me->group].ended, t->groups[me->group].size - (me->group == 0))) return;
    const size_t groups = t->num_groups - (t->groups[0].size == 1); /* those with another worker than 0 */
    if (groups == 1 || is_last(&pool.all.ended, groups)) kt_event_bump(&pool.finished);
}

/* Of the process's CPUs, those of the worker's own L3 cache if there are several; of its node, if the layer is on nodes. */
static void bind_worker(const kt_worker *me) {
    kt_cpus cpus = *me->teams->groups[me->group].cpus;
    if (!pool.bound) {
        if (!pool.cpus_known) return;
        bool any = false; /* the affinity mask may have changed since the domains were looked for */
        for (size_t i = 0; i < KT_CPU_WORDS; i++) any |= (cpus.words[i] &= pool.cpus.words[i]) != 0;
        if (!any || pool.placement->num_domains == 1) cpus = pool.cpus;
    }
    kt_os_bind(&cpus, NULL);
}

static void wake(meeting *waiting, kt_task task, void *context) {
    waiting->task = task;
    waiting->context = context;
    kt_event_bump(&waiting->epoch);
}

static void *work(void *argument) {
    const kt_worker *me = argument;
    const kt_group *own = &me->teams->groups[me->group];
    meeting *group = &pool.groups[me->group];
    const bool first = me->index == own->first;
    meeting *waits = first ? &pool.all : group;
    bind_worker(me);
    for (uint32_t seen = 0;; seen++) {
        kt_event_wait(&waits->epoch, seen);
        const kt_task task = waits->task;
        if (first && own->size > 1) wake(group, task, waits->context);
        if (!task) return NULL;
        run_task(task, waits->context, me);
        end_task(me);
    }
}

/* To the workers that wait for worker 0; the first of each group wakes the others. */
static void publish(kt_task task, void *context) {
    if (pool.teams.num_groups > 1) wake(&pool.all, task, context);
    if (pool.teams.groups[0].size > 1) wake(&pool.groups[0], task, context);
}

static void end_workers(void) {
    if (pool.started > 1) publish(NULL, NULL);
    for (size_t i = 1; i < pool.started; i++) pthread_join(pool.threads[i].id, NULL);
    free(pool.threads);
    free(pool.groups);
    pool.threads = NULL;
    pool.groups = NULL;
    pool.started = 0;
}

void kt_pool_stop(void) {
    end_workers();
    kt_teams_free(&pool.teams);
}

/* Fork waits for the running task, so that the child gets the driver's memory in order. The child has only the thread that
 * forked: it forgets the workers. */
static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork_parent(void) { pthread_mutex_unlock(&lock); }
static void after_fork_child(void) {
    pool.started = 0;
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

/* Before there is anything to lock, since another thread may fork at any time. */
__attribute__((constructor)) static void handle_forks(void) {
    pthread_atfork(before_fork, after_fork_parent, after_fork_child);
}

/* All that the workers wait on is new to them, at 0. */
static int make_meetings(void) {
    end_workers(); /* after a fork, there is the parent's memory */
    const size_t bytes = pool.teams.num_groups * sizeof *pool.groups;
    pool.threads = calloc(pool.teams.workers, sizeof *pool.threads);
    pool.groups = aligned_alloc(_Alignof(meeting), bytes);
    if (!pool.threads || !pool.groups) return ENOMEM;
    memset((void *)pool.groups, 0, bytes);
    memset((void *)&pool.all, 0, sizeof pool.all);
    memset((void *)&pool.finished, 0, sizeof pool.finished);
    for (size_t group = 0; group < pool.teams.num_groups; group++) {
        const kt_group *g = &pool.teams.groups[group];
        for (size_t i = g->first; i < g->first + g->size; i++) pool.threads[i].worker = (kt_worker){i, group, &pool.teams};
    }
    return 0;
}

static int start_workers(void) {
    int error = make_meetings();
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
    for (pool.started = !error; !error && pool.started < pool.teams.workers;) {
        thread *t = &pool.threads[pool.started];
        error = pthread_create(&t->id, NULL, work, &t->worker);
        pool.started += !error;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (error) kt_pool_stop();
    return error;
}

void kt_pool_lock(void) { pthread_mutex_lock(&lock); }
void kt_pool_unlock(void) { pthread_mutex_unlock(&lock); }

void kt_pool_configure(size_t threads, bool chosen, uint64_t spin_ns, const kt_placement *placement) {
    kt_pool_lock();
    wanted_threads = threads;
    threads_chosen = chosen;
    wanted_spin_ns = spin_ns;
    everywhere = placement;
    kt_pool_unlock();
}

size_t kt_pool_threads(void) {
    kt_pool_lock();
    const size_t threads = wanted_threads;
    kt_pool_unlock();
    return threads;
}

const kt_teams *kt_pool_teams(const kt_placement *placement) {
    const bool bound = placement;
    if (!bound) placement = everywhere;
    const size_t threads = bound && !threads_chosen ? placement->threads : wanted_threads;
    if (pool.teams.workers == threads && pool.placement == placement && pool.bound == bound) return &pool.teams;
    kt_pool_stop();
    pool.placement = placement;
    pool.bound = bound;
    return kt_teams_make(&pool.teams, placement, threads) ? NULL : &pool.teams;
}

int kt_pool_run(kt_task task, void *context, const kt_placement *placement) {
    const kt_teams *teams = kt_pool_teams(placement);
    if (!teams) return ENOMEM;
    const int error = pool.started ? 0 : start_workers();
    if (error) return error;
    kt_event_spin(teams->workers > pool.placement->num_cpus ? 0 : wanted_spin_ns);
    const uint32_t finished = atomic_load(&pool.finished.value);
    /* The caller's thread is the user's: it is kept to its own CPUs for this run only. */
    kt_cpus before;
    const bool kept = pool.bound && kt_os_bind(teams->groups[0].cpus, &before);
    publish(task, context);
    run_task(task, context, &pool.threads[0].worker);
    if (teams->workers > 1) kt_event_wait(&pool.finished, finished);
    if (kept) kt_os_bind(&before, NULL);
    return 0;
}

void kt_pool_barrier(const kt_worker *me) {
    const kt_teams *t = me->teams;
    const size_t size = t->groups[me->group].size;
    meeting *group = &pool.groups[me->group], *all = &pool.all;
    const uint32_t passed = atomic_load(&group->passed.value);
    if (!is_last(&group->arrived, size)) {
        kt_event_wait(&group->passed, passed);
        return;
    }
    if (t->num_groups > 1) {
        const uint32_t all_passed = atomic_load(&all->passed.value);
        if (is_last(&all->arrived, t->num_groups))
            kt_event_bump(&all->passed);
        else
            kt_event_wait(&all->passed, all_passed);
    }
    if (size > 1) kt_event_bump(&group->passed);
}
