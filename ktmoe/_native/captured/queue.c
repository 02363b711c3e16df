/* The queue of replayed calls and its thread.
 *
 * A record is queued once at most: if a replay that nobody waited for is overtaken by the next one, one call does for both, since
 * they share their memory. Host functions count themselves in and then look whether the queue is closed; who closes it does so first
 * and then waits until none is inside, so that none touches a record later.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

#include "base/pool.h"
#include "captured/queue.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    kt_record *first, *last, *running; /* under lock, as the records' own fields */
    size_t failures;
    bool started;
    pthread_t thread;
} queue;
static _Alignas(64) kt_event pushed; /* bumped for a record, or to end */
static _Alignas(64) kt_event inside; /* host functions */
static _Alignas(64) kt_event rested; /* bumped after a record's last part */
static _Atomic bool closed;

static bool come_in(void) {
    atomic_fetch_add(&inside.value, 1);
    return !atomic_load(&closed);
}

static void go_out(void) {
    atomic_fetch_sub(&inside.value, 1);
    kt_event_wake(&inside);
}

static bool queued(const kt_record *r) {
    const kt_record *other = queue.first;
    while (other && other != r) other = other->next;
    return other;
}

static void push(kt_record *r) {
    pthread_mutex_lock(&lock);
    r->submitted++;
    if (!queued(r)) {
        r->next = NULL;
        if (queue.last)
            queue.last->next = r;
        else
            queue.first = r;
        queue.last = r;
    }
    pthread_mutex_unlock(&lock);
    kt_event_bump(&pushed);
}

/* The next record, which runs from now on, and how many of its submissions that is for. */
static kt_record *pop(uint32_t *submitted) {
    pthread_mutex_lock(&lock);
    kt_record *r = queue.first;
    if (r) {
        queue.first = r->next;
        if (!queue.first) queue.last = NULL;
        *submitted = r->submitted;
    }
    queue.running = r;
    pthread_mutex_unlock(&lock);
    return r;
}

static void finish(kt_record *r, uint32_t submitted) {
    atomic_store(&r->finished.value, submitted);
    kt_event_wake(&r->finished);
}

static void rest(void) {
    pthread_mutex_lock(&lock);
    queue.running = NULL;
    pthread_mutex_unlock(&lock);
    kt_event_bump(&rested);
}

static void note(kt_record *r, enum kt_outcome outcome, int error) {
    if (outcome == KT_DONE) return;
    pthread_mutex_lock(&lock);
    if (r->outcome == KT_DONE) {
        r->outcome = outcome;
        r->error = error;
        queue.failures++;
    }
    pthread_mutex_unlock(&lock);
}

static void run(kt_record *r, uint32_t submitted) {
    bool defers;
    int error = 0;
    enum kt_outcome outcome = kt_record_now(r, &defers, &error);
    note(r, outcome, error); /* before, so that who has waited finds it */
    finish(r, submitted);
    if (defers) {
        outcome = kt_record_late(r, &error);
        note(r, outcome, error);
    }
    rest();
}

/* Lets the thread run wherever the process may: a new thread is kept to its starter's CPUs. */
static void unpin(void) {
    kt_cpus cpus;
    kt_pool_lock();
    const bool known = kt_os_process_cpus(&cpus);
    kt_pool_unlock();
    if (known) kt_os_bind(&cpus, NULL);
}

static void *work(void *nothing) {
    unpin();
    while (!atomic_load(&closed)) {
        const uint32_t seen = atomic_load(&pushed.value);
        uint32_t submitted;
        kt_record *r = pop(&submitted);
        if (r)
            run(r, submitted);
        else
            kt_event_wait(&pushed, seen, KT_IDLE);
    }
    return nothing;
}

int kt_queue_start(void) {
    pthread_mutex_lock(&lock);
    int error = atomic_load(&closed) ? ECANCELED : 0;
    if (!error && !queue.started) {
        error = kt_os_start(&queue.thread, work, NULL);
        queue.started = !error;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

void kt_queue_submit(void *record) {
    if (come_in()) push(record);
    go_out();
}

void kt_queue_await(void *record) {
    if (come_in()) {
        kt_record *r = record;
        pthread_mutex_lock(&lock);
        const uint32_t wanted = r->submitted;
        pthread_mutex_unlock(&lock);
        /* The waiter sleeps at once: the CPUs are the experts'. */
        for (uint32_t found; (int32_t)((found = atomic_load(&r->finished.value)) - wanted) < 0;)
            kt_event_wait(&r->finished, found, KT_NEVER);
    }
    go_out();
}

void kt_queue_close(void) {
    pthread_mutex_lock(&lock);
    const bool started = queue.started;
    queue.started = false;
    atomic_store(&closed, true);
    pthread_mutex_unlock(&lock);
    kt_event_bump(&pushed);
    if (started) pthread_join(queue.thread, NULL);
    /* Who came in before may still queue something. */
    for (uint32_t there; (there = atomic_load(&inside.value));) {
        uint32_t submitted;
        for (kt_record *r; (r = pop(&submitted));) {
            finish(r, submitted);
            rest();
        }
        kt_event_wait(&inside, there, KT_NEVER);
    }
}

bool kt_queue_idle(const kt_record *r) {
    pthread_mutex_lock(&lock);
    const bool idle = r != queue.running && !queued(r);
    pthread_mutex_unlock(&lock);
    return idle;
}

void kt_queue_forget(kt_record *r) {
    for (uint32_t seen; seen = atomic_load(&rested.value), !atomic_load(&closed) && !kt_queue_idle(r);)
        kt_event_wait(&rested, seen, KT_NEVER);
    int error;
    kt_queue_take_outcome(r, &error);
}

size_t kt_queue_failures(void) {
    pthread_mutex_lock(&lock);
    const size_t failures = queue.failures;
    pthread_mutex_unlock(&lock);
    return failures;
}

enum kt_outcome kt_queue_take_outcome(kt_record *r, int *error) {
    pthread_mutex_lock(&lock);
    const enum kt_outcome outcome = r->outcome;
    *error = r->error;
    r->outcome = KT_DONE;
    queue.failures -= outcome != KT_DONE;
    pthread_mutex_unlock(&lock);
    return outcome;
}

/* The child has no thread of these, and no graph runs in it. What failed before is in its records, too. */
static void after_fork_child(void) {
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    queue.first = queue.last = queue.running = NULL;
    queue.started = false;
    atomic_store(&inside.value, 0);
}

__attribute__((constructor)) static void handle_forks(void) { pthread_atfork(NULL, NULL, after_fork_child); }

kt_mark *kt_mark_make(void) {
    kt_mark *mark = malloc(sizeof *mark);
    if (mark) atomic_init(&mark->holders, 1);
    return mark;
}

void kt_mark_hold(kt_mark *mark) { atomic_fetch_add(&mark->holders, 1); }

void kt_mark_drop(void *mark) {
    if (atomic_fetch_sub(&((kt_mark *)mark)->holders, 1) == 1) free(mark);
}
