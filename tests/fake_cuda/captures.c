/* A capture: what is put into a stream while it is captured, and what nobody may call meanwhile. */
#include "fake.h"

enum { NONE, ACTIVE, INVALIDATED };

static struct {
    uint64_t id;
    int mode, status;
    pthread_t thread;
    struct graph *graph;
} capture;
static _Thread_local int mode = MODE_GLOBAL;

/* As cudaThreadExchangeStreamCaptureMode's comment has it. */
int fake_unsafe(void) {
    if (capture.status == NONE || mode == MODE_RELAXED) return SUCCESS;
    const bool both_global = mode == MODE_GLOBAL && capture.mode == MODE_GLOBAL;
    if (!both_global && !pthread_equal(capture.thread, pthread_self())) return SUCCESS;
    capture.status = INVALIDATED;
    return CAPTURE_UNSUPPORTED;
}

static void add(struct nodes *nodes, const struct nodes *others) {
    for (size_t i = 0; i < NODES / 64; i++) nodes->bits[i] |= others->bits[i];
}

int fake_captured(struct stream *stream, const struct work *work) {
    struct graph *graph = capture.graph;
    if (capture.status != ACTIVE || graph->count == NODES) return CAPTURE_INVALIDATED;
    const size_t node = graph->count++;
    graph->nodes[node] = *work;
    graph->nodes[node].after = stream->tails;
    stream->tails = (struct nodes){0};
    stream->tails.bits[node / 64] = (uint64_t)1 << node % 64;
    return SUCCESS;
}

uint64_t fake_capture_of(const struct stream *stream) { return stream->captured ? capture.id : 0; }

int cudaThreadExchangeStreamCaptureMode(int *other) {
    ENTER;
    const int before = mode;
    mode = *other;
    *other = before;
    LEAVE(SUCCESS);
}

int cudaStreamBeginCapture(void *handle, int asked) {
    ENTER;
    if (!handle || capture.status != NONE) LEAVE(CAPTURE_UNSUPPORTED);
    fake_stream(handle)->captured = true;
    capture.id++;
    capture.mode = asked;
    capture.status = ACTIVE;
    capture.thread = pthread_self();
    capture.graph = fake_graph();
    LEAVE(SUCCESS);
}

int cudaStreamEndCapture(void *handle, struct graph **out) {
    ENTER;
    if (!fake_stream(handle)->captured) LEAVE(INVALID_VALUE);
    const bool whole = capture.status == ACTIVE;
    capture.status = NONE;
    for (struct stream *stream = fake_streams; stream; stream = stream->next) {
        stream->captured = false;
        stream->tails = (struct nodes){0};
    }
    *out = whole ? capture.graph : NULL;
    if (!whole) fake_unreference(capture.graph);
    LEAVE(whole ? SUCCESS : CAPTURE_INVALIDATED);
}

static int information(void *handle, int *status, uint64_t *id, struct graph **graph, const void **nodes, size_t *count) {
    *status = fake_stream(handle)->captured ? capture.status : NONE;
    if (*status != ACTIVE) return SUCCESS;
    *id = capture.id;
    if (graph) *graph = capture.graph;
    if (nodes) *nodes = NULL; /* nobody here takes them */
    if (count) *count = 0;
    return SUCCESS;
}

int cudaStreamIsCapturing(void *handle, int *status) {
    ENTER;
    uint64_t id;
    LEAVE(information(handle, status, &id, NULL, NULL, NULL));
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

/* A stream that waits for an event of a captured one is captured from then on, too. */
int cudaStreamWaitEvent(void *handle, const struct event *event, unsigned flags) {
    (void)flags;
    ENTER;
    struct stream *stream = fake_stream(handle);
    if (event->capture) {
        if (capture.status == NONE || event->capture != capture.id) LEAVE(CAPTURED_EVENT);
        stream->captured = true;
        add(&stream->tails, &event->tails);
        LEAVE(SUCCESS);
    }
    LEAVE(fake_put(handle, (struct work){.kind = WAIT, .stream = event->stream, .until = event->until}));
}
