/* Streams and events, and the threads that work. */
#include <stdlib.h>
#include <string.h>

#include "fake.h"

struct call {
    host_function function;
    void *data;
    bool *over;
    struct call *next;
};

_Thread_local bool fake_is_host_thread;
static struct stream default_stream;
struct stream *fake_streams = &default_stream;
static struct call *first_call, *last_call;
static bool host_thread_runs;
static uint64_t order = 1; /* chooses among nodes of a graph that may run next */

static void start(void *(*function)(void *), void *data) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, function, data)) abort();
    pthread_detach(thread);
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

static bool ready(const struct nodes *after, const struct nodes *over) {
    uint64_t left = 0;
    for (size_t i = 0; i < NODES / 64; i++) left |= after->bits[i] & ~over->bits[i];
    return !left;
}

static void perform(const struct work *work);

/* One after the other, in any order that their dependencies allow. */
static void perform_nodes(const struct graph *graph) {
    struct nodes over = {0};
    for (size_t left = graph->count; left; left--) {
        size_t found = 0, chosen = 0;
        for (size_t node = 0; node < graph->count; node++) {
            if (over.bits[node / 64] >> node % 64 & 1 || !ready(&graph->nodes[node].after, &over)) continue;
            order = order * 6364136223846793005u + 1442695040888963407u;
            if ((order >> 33) % ++found == 0) chosen = node;
        }
        const struct work *work = &graph->nodes[chosen];
        if (work->kind != COPY || fake_usable(work)) perform(work);
        over.bits[chosen / 64] |= (uint64_t)1 << chosen % 64;
    }
}

static void perform(const struct work *work) {
    bool over = false;
    switch (work->kind) {
        case COPY:
        case KERNEL:
            pthread_mutex_unlock(&fake_lock);
            if (work->kind == COPY)
                memmove(work->target, work->source, work->bytes);
            else
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
        case LAUNCH: /* of one graph, they come one after the other, in whatever streams */
            while (work->graph->done < work->turn) pthread_cond_wait(&fake_changed, &fake_lock);
            perform_nodes(work->graph);
            work->graph->done++;
            fake_unreference(work->graph);
            break;
    }
}

static void *serve_stream(void *given) {
    struct stream *stream = given;
    pthread_mutex_lock(&fake_lock);
    for (;;) {
        while (!stream->first) pthread_cond_wait(&fake_changed, &fake_lock);
        struct work *work = stream->first;
        perform(work);
        stream->first = work->next;
        free(work);
        stream->done++;
        pthread_cond_broadcast(&fake_changed);
    }
    return NULL;
}

struct stream *fake_stream(void *handle) { return handle ? handle : &default_stream; }

int fake_put(void *handle, struct work given) {
    struct stream *stream = fake_stream(handle);
    if (stream->captured) return fake_captured(stream, &given);
    if (given.kind == COPY && !fake_usable(&given)) return INVALID_VALUE;
    struct work *work = malloc(sizeof *work);
    *work = given;
    if (stream->first)
        stream->last->next = work;
    else
        stream->first = work;
    stream->last = work;
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
    const struct stream *stream = fake_stream(handle);
    error = fake_unsafe();
    if (!error) until(stream, stream->queued);
    LEAVE(error);
}

int cudaDeviceSynchronize(void) {
    ENTER;
    error = fake_unsafe();
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
    free(event);
    LEAVE(SUCCESS);
}

int cudaEventRecord(struct event *event, void *handle) {
    ENTER;
    struct stream *stream = fake_stream(handle);
    *event = (struct event){stream, stream->queued, fake_capture_of(stream), stream->tails};
    LEAVE(SUCCESS);
}

int cudaEventSynchronize(const struct event *event) {
    ENTER;
    error = event->capture ? CAPTURED_EVENT : fake_unsafe();
    if (!error && event->stream) until(event->stream, event->until);
    LEAVE(error);
}

int fakeKernel(void *handle, int kernel, void *target, const void *source, const void *other, size_t bytes) {
    ENTER;
    LEAVE(fake_put(
        handle,
        (struct work){.kind = KERNEL, .kernel = kernel, .target = target, .source = source, .other = other, .bytes = bytes}));
}
