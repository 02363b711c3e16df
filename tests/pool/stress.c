/* The pool by itself, with tasks that show what it gets wrong: stress MODE THREADS ROUNDS SPIN_US CORES...
 *
 * CORES: for each shard the cores of its L3 caches, such as 8,8; that many threads spin as if each had a CPU. Prints what is wrong
 * and ends with 1. Linked with --wrap=pthread_create, so that threads can be refused.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/gate.h"
#include "base/pool.h"

enum { THREADS_MAX = 4096, GATES = 5, CACHES_MAX = 64 };

static size_t threads, rounds;
static uint64_t spin_ns;
static kt_domain domains[CACHES_MAX];
static kt_placement placement = {.domains = domains, .num_cpus = THREADS_MAX};
static size_t slots[THREADS_MAX]; /* plain: a race on them is the pool's mistake */
static kt_gate gates[GATES];
static size_t passes[THREADS_MAX][GATES];

#define CHECK(condition)                                                      \
    do {                                                                      \
        if (!(condition)) {                                                   \
            fprintf(stderr, "line %d: %s is not so\n", __LINE__, #condition); \
            _Exit(1);                                                         \
        }                                                                     \
    } while (0)

static uint64_t next_random(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

/* Now and then a thread is late: by less than the others spin, or by more. */
static void dawdle(uint64_t *state) {
    if (next_random(state) % 8) return;
    const uint64_t longest = 2 * spin_ns + 20000;
    nanosleep(&(struct timespec){.tv_nsec = (long)(next_random(state) % longest)}, NULL);
}

typedef int create(pthread_t *id, const pthread_attr_t *attributes, void *(*start)(void *), void *argument);
create __real_pthread_create, __wrap_pthread_create;

/* Of the threads that are still to be made, the one that is refused; 0: none. */
static size_t refused;
int __wrap_pthread_create(pthread_t *id, const pthread_attr_t *attributes, void *(*start)(void *), void *argument) {
    if (refused && !--refused) return EAGAIN;
    return __real_pthread_create(id, attributes, start, argument);
}

static size_t own_threads(void) {
    size_t count = 0;
    DIR *folder = opendir("/proc/self/task");
    CHECK(folder);
    for (struct dirent *entry; (entry = readdir(folder));) count += entry->d_name[0] != '.';
    closedir(folder);
    return count;
}

/* Once they are so many, or for a while: an ended one lingers a moment. */
static size_t settled_threads(size_t expected) {
    for (int tries = 0; tries < 100 && own_threads() != expected; tries++)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    return own_threads();
}

static void run(kt_task task, void *context) { CHECK(kt_pool_run(task, context, &placement) == 0); }

/* A worker is in a task once or, if it is late, not at all. Worker 0 always is, and somebody of each team. */
static void note(void *context, const kt_worker *me) {
    uint64_t state = *(size_t *)context * threads + me->index;
    CHECK(slots[me->index] < *(size_t *)context);
    dawdle(&state);
    slots[me->index] = *(size_t *)context;
}

static void tasks(void) {
    uint64_t state = 1;
    for (size_t round = 1; round <= rounds; round++) {
        run(note, &round);
        const kt_teams *teams = kt_pool_teams(&placement);
        CHECK(slots[0] == round);
        for (size_t shard = 0; shard < teams->shards; shard++) {
            const kt_team *team = &teams->of[shard];
            bool any = false;
            for (size_t i = team->first; i < team->first + team->size; i++) any |= slots[i] == round;
            CHECK(any);
        }
        dawdle(&state);
    }
}

/* Where worker 0 waits for all, all come, however late. */
static kt_gate missing;
static void meet(void *context, const kt_worker *me) {
    uint64_t state = *(size_t *)context * threads + me->index;
    dawdle(&state);
    slots[me->index]++;
    kt_gate_pass(&missing, 1);
    if (me->index == 0) kt_gate_wait(&missing);
}

static void meetings(void) {
    for (size_t round = 1; round <= rounds; round++) {
        kt_gate_close(&missing, (uint32_t)threads);
        run(meet, &round);
        for (size_t i = 0; i < threads; i++) CHECK(slots[i] == round);
    }
}

/* Each passes every gate three times in all, by ones or twos, and waits for it in between: what all wrote is there. */
static void pass_gates(void *context, const kt_worker *me) {
    uint64_t state = *(size_t *)context * threads + me->index;
    for (size_t n = 0; n < GATES; n++) {
        const uint32_t first = 1 + (uint32_t)next_random(&state) % 3;
        dawdle(&state);
        passes[me->index][n]++;
        kt_gate_pass(&gates[n], first);
        if (first < 3) {
            CHECK(!kt_gate_is_open(&gates[n]));
            kt_gate_pass(&gates[n], 3 - first);
        }
        if (next_random(&state) % 2) kt_gate_wait(&gates[n]);
    }
    for (size_t n = 0; n < GATES; n++) {
        kt_gate_wait(&gates[n]);
        CHECK(kt_gate_is_open(&gates[n]));
        for (size_t i = 0; i < threads; i += 1 + threads / 64) CHECK(passes[i][n] == *(size_t *)context);
    }
}

static void pass_all(void) {
    for (size_t round = 1; round <= rounds; round++) {
        for (size_t n = 0; n < GATES; n++) kt_gate_close(&gates[n], 3 * (uint32_t)threads);
        run(pass_gates, &round);
    }
}

/* Callers side by side, one of which changes the number of threads, the placement and how long threads spin. */
static size_t shared;
static kt_placement others[2];
static void add_one(void *context, const kt_worker *me) {
    size_t *count = context; /* one a worker, and one line for each */
    count[8 * me->index]++;
    kt_gate_pass(&missing, 1);
    if (me->index) return;
    kt_gate_wait(&missing);
    shared++;
}

static void *call(void *argument) {
    uint64_t state = (uint64_t)(uintptr_t)argument;
    size_t *count = calloc(8 * threads, sizeof *count);
    CHECK(count);
    for (size_t round = 0; round < rounds; round++) {
        const size_t wanted = 1 + next_random(&state) % threads;
        if (next_random(&state) % 4 == 0) kt_pool_configure(wanted, next_random(&state) % 2, state % 3 * spin_ns, &placement);
        const size_t limit = kt_pool_threads(); /* another caller may have set it by now */
        CHECK(limit && limit <= threads);
        kt_pool_lock();
        const size_t which = next_random(&state) % 3;
        const kt_placement *own = which < 2 ? &others[which] : NULL;
        const kt_teams *teams = kt_pool_teams(own);
        CHECK(teams);
        const size_t workers = teams->workers;
        memset(count, 0, 8 * threads * sizeof *count);
        kt_gate_close(&missing, (uint32_t)workers);
        CHECK(workers <= threads && kt_pool_run(add_one, count, own) == 0);
        for (size_t i = 0; i < threads; i++) CHECK(count[8 * i] == (i < workers));
        if (next_random(&state) % 16 == 0) kt_pool_stop();
        kt_pool_unlock();
    }
    free(count);
    return NULL;
}

static void callers(void) {
    pthread_t ids[3];
    for (size_t i = 0; i < 2; i++) others[i] = placement, others[i].threads = i ? threads : 1;
    for (size_t i = 0; i < 3; i++) CHECK(pthread_create(&ids[i], NULL, call, (void *)(i + 1)) == 0);
    for (size_t i = 0; i < 3; i++) pthread_join(ids[i], NULL);
    CHECK(shared == 3 * rounds);
}

/* While another thread runs tasks; the child has none of the threads and starts its own. */
static _Atomic bool stopped;
static void nothing(void *context, const kt_worker *me) { (void)context, (void)me; }

static void *keep_running(void *argument) {
    while (!stopped) {
        kt_pool_lock();
        run(nothing, NULL);
        kt_pool_unlock();
    }
    return argument;
}

static void forks(void) {
    pthread_t id;
    CHECK(pthread_create(&id, NULL, keep_running, NULL) == 0);
    for (size_t round = 0; round < rounds; round++) {
        const pid_t child = fork();
        CHECK(child >= 0);
        if (!child) {
            CHECK(own_threads() == 1);
            kt_pool_lock();
            for (int i = 0; i < 3; i++) run(nothing, NULL);
            CHECK(own_threads() == threads);
            kt_pool_stop();
            kt_pool_unlock();
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    stopped = true;
    pthread_join(id, NULL);
}

/* The k-th thread is refused: no other one stays, and the next run has all. */
static void refusals(void) {
    const size_t step = 1 + threads / rounds;
    for (size_t k = 1; k < threads; k += step) {
        refused = k;
        CHECK(kt_pool_run(nothing, NULL, &placement) == EAGAIN);
        refused = 0;
        run(nothing, NULL);
        kt_pool_stop();
    }
}

static const struct mode {
    const char *name;
    void (*check)(void);
} modes[] = {{"tasks", tasks},     {"meetings", meetings}, {"gates", pass_all},
             {"callers", callers}, {"forks", forks},       {"refusals", refusals}};

int main(int count, char **words) {
    CHECK(count > 5 && count - 5 <= KT_SHARDS_MAX);
    threads = strtoul(words[2], NULL, 10);
    rounds = strtoul(words[3], NULL, 10);
    spin_ns = 1000 * strtoull(words[4], NULL, 10);
    kt_cpus all;
    CHECK(threads <= THREADS_MAX && kt_os_process_cpus(&all));
    for (int i = 5; i < count; i++, placement.shards++)
        for (char *cores = strtok(words[i], ","); cores; cores = strtok(NULL, ","))
            domains[placement.num_domains++] = (kt_domain){placement.shards, strtoul(cores, NULL, 10), all, all};
    kt_pool_configure(threads, true, spin_ns, &placement);
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        if (strcmp(modes[i].name, words[1]) != 0) continue;
        run(nothing, NULL); /* a sanitizer starts a thread of its own with the first one */
        kt_pool_stop();
        const size_t before = settled_threads(0);
        modes[i].check();
        kt_pool_stop();
        CHECK(settled_threads(before) == before);
        return 0;
    }
    fprintf(stderr, "no mode %s\n", words[1]);
    return 1;
}
