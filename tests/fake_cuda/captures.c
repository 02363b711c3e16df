/* Captures: what is put into a stream while it is captured, and what nobody may call meanwhile. */
#include <stdlib.h>

#include "fake.h"

static struct capture *captures;
static uint64_t ids;
static _Thread_local int mode = MODE_GLOBAL;

void fake_add_place(struct places *places, size_t place) {
    for (size_t i = 0; i < places->count; i++) {
        if (places->at[i] == place) return;
    }
    places->at = realloc(places->at, (places->count + 1) * sizeof *places->at);
    places->at[places->count++] = place;
}

void fake_add_places(struct places *places, const struct places *others) {
    for (size_t i = 0; i < others->count; i++) fake_add_place(places, others->at[i]);
}

void fake_no_places(struct places *places) {
    free(places->at);
    *places = (struct places){NULL, 0};
}

/* As cudaThreadExchangeStreamCaptureMode's comment has it. */
int fake_unsafe(void) {
    int error = SUCCESS;
    if (mode == MODE_RELAXED) return error;
    for (struct capture *capture = captures; capture; capture = capture->next) {
        const bool own = pthread_equal(capture->thread, pthread_self());
        if (own ? capture->mode != MODE_RELAXED : mode == MODE_GLOBAL && capture->mode == MODE_GLOBAL) {
            capture->status = STATUS_INVALIDATED;
            error = CAPTURE_UNSUPPORTED;
        }
    }
    return error;
}

int fake_conflict(struct stream *stream) {
    if (!stream->capture) return SUCCESS;
    stream->capture->status = STATUS_INVALIDATED;
    return CAPTURE_UNSUPPORTED;
}

int fake_captured(struct stream *stream, struct work work) {
    struct capture *capture = stream->capture;
    if (capture->status != STATUS_ACTIVE) return CAPTURE_INVALIDATED;
    const size_t node = fake_add_node(capture->graph, work, &stream->tails);
    fake_no_places(&stream->tails);
    fake_add_place(&stream->tails, node);
    return SUCCESS;
}

/* Whether all nodes come before the origin's last ones. */
static bool joined(const struct capture *capture) {
    const struct graph *graph = capture->graph;
    const struct places *tails = &capture->origin->tails;
    bool *reached = calloc(graph->count + 1, sizeof *reached), all = true;
    for (size_t i = 0; i < tails->count; i++) reached[tails->at[i]] = true;
    for (size_t node = graph->count; node--;) {
        const struct places *after = &graph->nodes[node].after;
        all &= reached[node];
        for (size_t i = 0; i < after->count; i++) reached[after->at[i]] = true;
    }
    free(reached);
    return all;
}

static void leave(struct stream *stream, const struct capture *capture) {
    if (stream->capture != capture) return;
    stream->capture = NULL;
    fake_no_places(&stream->tails);
}

int cudaThreadExchangeStreamCaptureMode(int *other) {
    ENTER;
    const int before = mode;
    if (*other < MODE_GLOBAL || *other > MODE_RELAXED) LEAVE(INVALID_VALUE);
    mode = *other;
    *other = before;
    LEAVE(SUCCESS);
}

int cudaStreamBeginCapture(void *handle, int asked) {
    ENTER;
    struct stream *stream = fake_stream(handle);
    if (!handle) LEAVE(CAPTURE_UNSUPPORTED);
    if (!stream) LEAVE(INVALID_HANDLE);
    if (stream->capture) LEAVE(INVALID_VALUE);
    struct capture *capture = malloc(sizeof *capture);
    *capture = (struct capture){++ids, asked, STATUS_ACTIVE, pthread_self(), stream, fake_graph(), captures};
    captures = stream->capture = capture;
    LEAVE(SUCCESS);
}

int cudaStreamEndCapture(void *handle, struct graph **out) {
    ENTER;
    struct stream *stream = fake_stream(handle);
    struct capture *capture = stream ? stream->capture : NULL;
    if (!stream) LEAVE(INVALID_HANDLE);
    if (!capture) LEAVE(INVALID_VALUE);
    if (capture->origin != stream) {
        capture->status = STATUS_INVALIDATED;
        LEAVE(CAPTURE_UNMATCHED);
    }
    if (capture->mode != MODE_RELAXED && !pthread_equal(capture->thread, pthread_self())) LEAVE(CAPTURE_WRONG_THREAD);
    if (capture->status != STATUS_ACTIVE)
        error = CAPTURE_INVALIDATED;
    else if (!joined(capture))
        error = CAPTURE_UNJOINED;
    for (struct stream *other = fake_streams; other; other = other->next) leave(other, capture);
    struct capture **link = &captures;
    while (*link != capture) link = &(*link)->next;
    *link = capture->next;
    *out = error ? NULL : capture->graph;
    if (error) fake_dispose(capture->graph);
    free(capture);
    LEAVE(error);
}

int cudaStreamIsCapturing(void *handle, int *status) {
    ENTER;
    const struct stream *stream = fake_stream(handle);
    if (!stream) LEAVE(INVALID_HANDLE);
    *status = stream->capture ? stream->capture->status : STATUS_NONE;
    LEAVE(SUCCESS);
}

static int information(void *handle, int *status, uint64_t *id, struct graph **graph, const void **nodes, size_t *count) {
    const struct stream *stream = fake_stream(handle);
    if (!stream) return INVALID_HANDLE;
    const struct capture *capture = stream->capture;
    *status = capture ? capture->status : STATUS_NONE;
    if (*status != STATUS_ACTIVE) return SUCCESS;
    if (id) *id = capture->id;
    if (graph) *graph = capture->graph;
    if (nodes) *nodes = NULL; /* nobody here takes them */
    if (count) *count = 0;
    return SUCCESS;
}

/* One name, and up to three ways to call it, by the version. */
#if FAKE_CUDA == 13
int cudaStreamGetCaptureInfo(void *handle, int *status, uint64_t *id, struct graph **graph, const void **nodes,
                             const void **edges, size_t *count) {
    ENTER;
    if (edges) *edges = NULL;
    LEAVE(information(handle, status, id, graph, nodes, count));
}
#else
int cudaStreamGetCaptureInfo(void *handle, int *status, uint64_t *id) {
    ENTER;
    LEAVE(information(handle, status, id, NULL, NULL, NULL));
}
#if FAKE_CUDA != 1102
int cudaStreamGetCaptureInfo_v2(void *handle, int *status, uint64_t *id, struct graph **graph, const void **nodes,
                                size_t *count) {
    ENTER;
    LEAVE(information(handle, status, id, graph, nodes, count));
}
#endif
#if FAKE_CUDA == 12
int cudaStreamGetCaptureInfo_v3(void *handle, int *status, uint64_t *id, struct graph **graph, const void **nodes,
                                const void **edges, size_t *count) {
    ENTER;
    if (edges) *edges = NULL;
    LEAVE(information(handle, status, id, graph, nodes, count));
}
#endif
#endif

/* Of an event that was recorded in a stream that is captured: the waiting stream is captured from then on, too. */
static int join(struct stream *stream, const struct event *event) {
    struct capture *capture = captures;
    while (capture && capture->id != event->capture) capture = capture->next;
    if (!capture) return CAPTURED_EVENT;
    if (stream->capture && stream->capture != capture) {
        capture->status = stream->capture->status = STATUS_INVALIDATED;
        return CAPTURE_MERGE;
    }
    stream->capture = capture;
    fake_add_places(&stream->tails, &event->tails);
    return SUCCESS;
}

int cudaStreamWaitEvent(void *handle, const struct event *event, unsigned flags) {
    (void)flags;
    ENTER;
    struct stream *stream = fake_stream(handle);
    if (!stream) LEAVE(INVALID_HANDLE);
    if (event->capture) LEAVE(join(stream, event));
    if (!event->stream) LEAVE(SUCCESS);
    if (stream->capture) {
        stream->capture->status = STATUS_INVALIDATED;
        LEAVE(CAPTURE_ISOLATION);
    }
    LEAVE(fake_put(handle, (struct work){.kind = WAIT, .stream = event->stream, .until = event->until}));
}
