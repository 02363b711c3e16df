/* Streams and events, and the threads that work. */
#define _POSIX_C_SOURCE 200809L
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fake.h"

struct item {
    struct work work;
    struct item *next;
};

struct call {
    host_function function;
    void *data;
    bool *over;
    struct call *next;
};

struct stream *fake_streams;
_Thread_local bool fake_is_host_thread;
static struct stream default_stream;
static struct call *first_call, *last_call;
static bool host_thread_runs;
static uint64_t order = 1; /* chooses among nodes of a graph that may run next */

static void start(void *(*function)(void *), void *data) {
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&thread, NULL, function, data)) abort();
    pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void *serve_host_functions(void *unused) {
    fake_is_host_thread = true;
    pthread_mutex_lock(&fake_lock);
    for (;;) {
        while (!first_call) pthread_cond_wait(&fake_changed, &fake_lock);
        struct call *call = first_call;
        first_call = call->next;
        pthread_mutex_unlock(&fake_lock);
        call->function(call->data);
        pthread_mutex_lock(&fake_lock);
        if (call->over) *call->over = true;
        free(call);
        pthread_cond_broadcast(&fake_changed);
    }
    return unused;
}

void fake_on_host_thread(host_function function, void *data, bool *over) {
    struct call *call = malloc(sizeof *call);
    *call = (struct call){function, data, over, NULL};
    if (first_call)
        last_call->next = call;
    else
        first_call = call;
    last_call = call;
    if (!host_thread_runs) start(serve_host_functions, NULL);
    host_thread_runs = true;
    pthread_cond_broadcast(&fake_changed);
}

static bool ready(const struct work *work, const bool *over) {
    for (size_t i = 0; i < work->after.count; i++) {
        if (!over[work->after.at[i]]) return false;
    }
    return true;
}

static void perform(const struct work *work);

/* One after the other, in any order that their dependencies allow. */
static void perform_nodes(const struct graph *graph) {
    bool *over = calloc(graph->count + 1, sizeof *over);
    for (size_t left = graph->count; left; left--) {
        size_t found = 0, chosen = 0;
        for (size_t node = 0; node < graph->count; node++) {
            if (over[node] || !ready(&graph->nodes[node], over)) continue;
            order = order * 6364136223846793005u + 1442695040888963407u;
            if ((order >> 33) % ++found == 0) chosen = node;
        }
        const struct work *work = &graph->nodes[chosen];
        if (work->kind != COPY)
            perform(work);
        else if (fake_use(work))
            perform(work);
        over[chosen] = true;
    }
    free(over);
}

static void perform(const struct work *work) {
    struct executable *executable = work->executable;
    bool over = false;
    switch (work->kind) {
        case COPY:
            pthread_mutex_unlock(&fake_lock);
            memmove(work->target, work->source, work->bytes);
            pthread_mutex_lock(&fake_lock);
            fake_unuse(work);
            break;
        case KERNEL:
            pthread_mutex_unlock(&fake_lock);
            fake_kernel(work);
            pthread_mutex_lock(&fake_lock);
            break;
        case HOST:
            fake_on_host_thread(work->function, work->data, &over);
            while (!over) pthread_cond_wait(&fake_changed, &fake_lock);
            break;
        case WAIT:
            while (work->stream->done < work->until) pthread_cond_wait(&fake_changed, &fake_lock);
            break;
        case LAUNCH:
            while (executable->done < work->turn) pthread_cond_wait(&fake_changed, &fake_lock);
            perform_nodes(&executable->graph);
            executable->done++;
            fake_unreference(executable);
            break;
    }
}

static void *serve_stream(void *given) {
    struct stream *stream = given;
    pthread_mutex_lock(&fake_lock);
    for (;;) {
        while (!stream->first) pthread_cond_wait(&fake_changed, &fake_lock);
        struct item *item = stream->first;
        perform(&item->work);
        stream->first = item->next;
        free(item);
        stream->done++;
        pthread_cond_broadcast(&fake_changed);
    }
    return NULL;
}

struct stream *fake_stream(void *handle) {
    if (!handle) return &default_stream;
    struct stream *stream = fake_streams;
    while (stream && stream != handle) stream = stream->next;
    return stream;
}

int fake_put(void *handle, struct work work) {
    struct stream *stream = fake_stream(handle);
    if (!stream) return INVALID_HANDLE;
    if (stream->capture) return fake_captured(stream, work);
    if (work.kind == COPY && !fake_use(&work)) return INVALID_VALUE;
    struct item *item = malloc(sizeof *item);
    *item = (struct item){work, NULL};
    if (stream->first)
        stream->last->next = item;
    else
        stream->first = item;
    stream->last = item;
    stream->queued++;
    if (!stream->runs) start(serve_stream, stream);
    stream->runs = true;
    pthread_cond_broadcast(&fake_changed);
    return SUCCESS;
}

static void until(const struct stream *stream, uint64_t place) {
    while (stream->done < place) pthread_cond_wait(&fake_changed, &fake_lock);
}

void fake_everything_done(void) {
    until(&default_stream, default_stream.queued);
    for (const struct stream *stream = fake_streams; stream; stream = stream->next) until(stream, stream->queued);
}

/* CUDA's: streams. */

int cudaStreamCreateWithFlags(void **out, unsigned flags) {
    (void)flags; /* none waits for the default stream, as torch's do not */
    ENTER;
    struct stream *stream = calloc(1, sizeof *stream);
    stream->next = fake_streams;
    *out = fake_streams = stream;
    LEAVE(SUCCESS);
}

int cudaStreamSynchronize(void *handle) {
    ENTER;
    struct stream *stream = fake_stream(handle);
    if (!stream) LEAVE(INVALID_HANDLE);
    error = fake_conflict(stream);
    if (!error) error = fake_unsafe();
    if (!error) until(stream, stream->queued);
    LEAVE(error);
}

int cudaStreamQuery(void *handle) {
    ENTER;
    struct stream *stream = fake_stream(handle);
    if (!stream) LEAVE(INVALID_HANDLE);
    error = fake_conflict(stream);
    if (!error) error = fake_unsafe();
    if (!error && stream->done < stream->queued) error = NOT_READY;
    LEAVE(error);
}

int cudaDeviceSynchronize(void) {
    ENTER;
    error = fake_conflict(&default_stream);
    for (struct stream *stream = fake_streams; stream && !error; stream = stream->next) error = fake_conflict(stream);
    if (!error) error = fake_unsafe();
    if (!error) fake_everything_done();
    LEAVE(error);
}

int cudaMemcpyAsync(void *target, const void *source, size_t bytes, int kind, void *handle) {
    (void)kind;
    ENTER;
    LEAVE(fake_put(handle, (struct work){.kind = COPY, .target = target, .source = source, .bytes = bytes}));
}

#ifndef WITHOUT_cudaLaunchHostFunc
int cudaLaunchHostFunc(void *handle, host_function function, void *data) {
    ENTER;
    LEAVE(function ? fake_put(handle, (struct work){.kind = HOST, .function = function, .data = data}) : INVALID_VALUE);
}
#endif

/* CUDA's: events. */

int cudaEventCreateWithFlags(void **out, unsigned flags) {
    (void)flags;
    ENTER;
    *out = calloc(1, sizeof(struct event));
    LEAVE(SUCCESS);
}

int cudaEventDestroy(void *event) {
    ENTER;
    fake_no_places(&((struct event *)event)->tails);
    free(event);
    LEAVE(SUCCESS);
}

int cudaEventRecord(void *given, void *handle) {
    ENTER;
    struct event *event = given;
    struct stream *stream = fake_stream(handle);
    if (!stream) LEAVE(INVALID_HANDLE);
    fake_no_places(&event->tails);
    event->stream = stream;
    event->until = stream->queued;
    event->capture = stream->capture ? stream->capture->id : 0;
    if (stream->capture) fake_add_places(&event->tails, &stream->tails);
    LEAVE(SUCCESS);
}

static int ask(const struct event *event) {
    if (event->capture) return CAPTURED_EVENT;
    return fake_unsafe();
}

int cudaEventQuery(void *given) {
    ENTER;
    const struct event *event = given;
    error = ask(event);
    if (!error && event->stream && event->stream->done < event->until) error = NOT_READY;
    LEAVE(error);
}

int cudaEventSynchronize(void *given) {
    ENTER;
    const struct event *event = given;
    error = ask(event);
    if (!error && event->stream) until(event->stream, event->until);
    LEAVE(error);
}

/* The tests'. */

void fakeSeed(uint64_t seed) { order = seed; }

/* How many works were put into a stream, which is not captured, so far. */
uint64_t fakeQueued(void *handle) {
    pthread_mutex_lock(&fake_lock);
    const uint64_t queued = fake_stream(handle)->queued;
    pthread_mutex_unlock(&fake_lock);
    return queued;
}

/* Whether a stream gets to its end within so many milliseconds. */
int fakeWait(void *handle, int milliseconds) {
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += milliseconds / 1000;
    pthread_mutex_lock(&fake_lock);
    const struct stream *stream = fake_stream(handle);
    while (stream->done < stream->queued && !pthread_cond_timedwait(&fake_changed, &fake_lock, &end)) continue;
    const bool done = stream->done == stream->queued;
    pthread_mutex_unlock(&fake_lock);
    return done;
}

int fakeKernel(void *handle, int kernel, void *target, const void *source, const void *other, size_t bytes) {
    struct work work = {.kind = KERNEL, .kernel = kernel, .target = target, .source = source, .other = other, .bytes = bytes};
    ENTER;
    LEAVE(fake_put(handle, work));
}
