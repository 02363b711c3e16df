/* A small thread pool: wake-up in microseconds, a bounded spin before sleeping, sound after fork.
 *
 * A task is over when worker 0 has done it, somebody of each other shard's team has, and nobody is in it any more. A thread that wakes
 * up later than that finds it shut, so that no call waits for a thread that the system keeps from running. Workers are woken, come in
 * and are counted by group, so that no cache line is waited for by more threads than a group has. The number of threads changes only
 * between tasks, by stopping all workers and starting the new number.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/cpu.h"
#include "base/event.h"
#include "base/pool.h"

/* Where the workers of a group come into a task. */
typedef struct door {
    _Alignas(64) kt_event epoch; /* bumped for a task, or to stop */
    kt_event inside;             /* how many, and SHUT */
    _Atomic uint64_t entered;    /* the last task that one of them was in */
} door;

enum { SHUT = 1 << 16 };

typedef struct thread {
    kt_worker worker;
    pthread_t id; /* worker 0 has none */
} thread;

static struct pool {
    _Alignas(64) _Atomic size_t woken; /* groups */
    _Alignas(64) kt_event entered;     /* bumped when the first of a group comes in */
    _Alignas(64) kt_task task;         /* NULL: stop */
    void *context;
    uint64_t number;               /* of the task */
    kt_teams teams;                /* no workers: to be made */
    const kt_placement *placement; /* that they were made for */
    bool bound;                    /* all workers to that placement's CPUs */
    kt_cpus cpus;                  /* the process's, if not: not those that the first caller happened to be kept to */
    bool cpus_known;
    size_t started; /* threads, the caller's included; 0 before the first run and after fork */
    thread *threads;
    door *doors; /* of the groups */
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

static void run_task(kt_task task, void *context, const kt_worker *me) {
    const unsigned state = kt_fp_enter();
    task(context, me);
    kt_fp_leave(state);
}

/* Keeps a worker to the CPUs of its own L3 cache if there are several caches or the layer is on nodes, else to the process's
 * CPUs. If the layer is not on nodes, the process must be allowed to use them now. */
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

static bool come_in(door *d) { return !(atomic_fetch_add(&d->inside.value, 1) & SHUT); }

static void go_out(door *d) {
    if (atomic_fetch_sub(&d->inside.value, 1) - 1 == SHUT) kt_event_wake(&d->inside);
}

/* Whoever is in the task wakes the next group, so that it takes steps and not a row. */
static void wake_groups(void) {
    const size_t groups = pool.teams.num_groups;
    while (atomic_load(&pool.woken) < groups) {
        const size_t next = atomic_fetch_add(&pool.woken, 1);
        if (next >= groups) return;
        atomic_fetch_and(&pool.doors[next].inside.value, ~(uint32_t)SHUT);
        kt_event_bump(&pool.doors[next].epoch);
    }
}

/* Groups are woken in ascending order by workers of groups that were woken before, so no door behind is opened any more. */
static void shut_doors(void) {
    for (door *d = pool.doors; d < pool.doors + pool.teams.num_groups; d++) {
        atomic_fetch_or(&d->inside.value, SHUT);
        for (uint32_t inside; (inside = atomic_load(&d->inside.value)) != SHUT;) kt_event_wait(&d->inside, inside, KT_IN_TASK);
    }
}

static bool was_in(const kt_team *team) {
    for (size_t g = team->first_group; g < team->first_group + team->num_groups; g++)
        if (!g || atomic_load(&pool.doors[g].entered) == pool.number) return true; /* worker 0 is in group 0 */
    return false;
}

/* Waits until somebody of each team has come in; the others may come too late. */
static void wait_for_teams(void) {
    for (const kt_team *team = pool.teams.of; team < pool.teams.of + pool.teams.shards; team++)
        for (uint32_t entered; entered = atomic_load(&pool.entered.value), !was_in(team);)
            kt_event_wait(&pool.entered, entered, KT_IN_TASK);
}

/* The number of the task that a worker was in; 0 to stop. */
static uint64_t take_part(const kt_worker *me, door *own, uint64_t last) {
    const uint64_t number = pool.task ? pool.number : 0;
    wake_groups();
    if (!number || number == last) return number; /* it was in this one: it came in before it was woken */
    if (pool.teams.shards > 1 && atomic_load(&own->entered) != number && atomic_exchange(&own->entered, number) != number)
        kt_event_bump(&pool.entered); /* the load comes first, since an exchange takes the line from the others in any case */
    run_task(pool.task, pool.context, me);
    return number;
}

static void *work(void *argument) {
    const kt_worker *me = argument;
    door *own = &pool.doors[me->group];
    bind_worker(me);
    uint64_t last = UINT64_MAX;
    for (uint32_t seen = 0; last;) {
        kt_event_wait(&own->epoch, seen, KT_IDLE);
        seen = atomic_load(&own->epoch.value);
        if (come_in(own)) last = take_part(me, own, last);
        go_out(own);
    }
    return NULL;
}

/* All doors are shut and nobody is behind one: what is written here is read by those alone that a door lets in after this. */
static void publish(kt_task task, void *context) {
    pool.task = task;
    pool.context = context;
    pool.number++;
    atomic_store(&pool.woken, 0);
    wake_groups();
}

/* The doors stay open for this, so that the latest thread comes in, too, and finds that it is to stop. */
static void end_workers(void) {
    if (pool.started > 1) publish(NULL, NULL);
    for (size_t i = 1; i < pool.started; i++) pthread_join(pool.threads[i].id, NULL);
    free(pool.threads);
    free(pool.doors);
    pool.threads = NULL;
    pool.doors = NULL;
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

/* The handlers are there before there is anything to lock, since another thread may fork at any time. */
__attribute__((constructor)) static void handle_forks(void) {
    pthread_atfork(before_fork, after_fork_parent, after_fork_child);
}

/* All that the workers wait on is new to them, at 0. */
static int make_doors(void) {
    end_workers(); /* after a fork, there is the parent's memory */
    const size_t bytes = pool.teams.num_groups * sizeof *pool.doors;
    pool.threads = calloc(pool.teams.workers, sizeof *pool.threads);
    pool.doors = aligned_alloc(_Alignof(door), bytes);
    if (!pool.threads || !pool.doors) return ENOMEM;
    memset((void *)pool.doors, 0, bytes);
    memset((void *)&pool.entered, 0, sizeof pool.entered);
    for (size_t group = 0; group < pool.teams.num_groups; group++) atomic_store(&pool.doors[group].inside.value, SHUT);
    for (size_t group = 0; group < pool.teams.num_groups; group++) {
        const kt_group *g = &pool.teams.groups[group];
        for (size_t i = g->first; i < g->first + g->size; i++) pool.threads[i].worker = (kt_worker){i, group, &pool.teams};
    }
    return 0;
}

static int start_workers(void) {
    int error = make_doors();
    pool.cpus_known = kt_os_process_cpus(&pool.cpus);
    for (pool.started = !error; !error && pool.started < pool.teams.workers;) {
        thread *t = &pool.threads[pool.started];
        error = kt_os_start(&t->id, work, &t->worker);
        pool.started += !error;
    }
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
    /* The caller's thread is the user's: it is kept to its own CPUs for this run only. */
    kt_cpus before;
    const bool kept = pool.bound && kt_os_bind(teams->groups[0].cpus, &before);
    if (teams->workers > 1) publish(task, context);
    run_task(task, context, &pool.threads[0].worker);
    if (teams->workers > 1) {
        wait_for_teams();
        shut_doors();
    }
    if (kept) kt_os_bind(&before, NULL);
    return 0;
}
