/* Graphs, and user objects, which they own. An executable graph is the graph itself, with one more reference. */
#include <stdlib.h>

#include "fake.h"

enum { MOVE = 1, NO_DESTRUCTOR_SYNC = 1 };

/* A destructor runs on the thread of the host functions, some time. */
static void release(struct object *object, unsigned count) {
    object->references -= count;
    if (object->references) return;
    fake_on_host_thread(object->destroy, object->data, NULL);
    free(object);
}

struct graph *fake_graph(void) {
    struct graph *graph = calloc(1, sizeof *graph);
    graph->nodes = calloc(NODES, sizeof *graph->nodes);
    graph->references = 1;
    return graph;
}

void fake_unreference(struct graph *graph) {
    if (--graph->references) return;
    if (graph->object) release(graph->object, 1);
    free(graph->nodes);
    free(graph);
}

int cudaGraphInstantiateWithFlags(struct graph **out, struct graph *graph, unsigned long long flags) {
    (void)flags;
    ENTER;
    graph->references++;
    *out = graph;
    LEAVE(SUCCESS);
}

int cudaGraphDestroy(struct graph *graph) {
    ENTER;
    fake_unreference(graph);
    LEAVE(SUCCESS);
}

/* What a launch that is under way needs stays until it is over. */
int cudaGraphExecDestroy(struct graph *graph) {
    ENTER;
    fake_unreference(graph);
    LEAVE(SUCCESS);
}

int cudaGraphLaunch(struct graph *graph, void *handle) {
    ENTER;
    graph->references++;
    LEAVE(fake_put(handle, (struct work){.kind = LAUNCH, .graph = graph, .turn = graph->launches++}));
}

#if FAKE_CUDA != 1102
int cudaUserObjectCreate(struct object **out, void *data, host_function destroy, unsigned references, unsigned flags) {
    ENTER;
    if (!destroy || !references || flags != NO_DESTRUCTOR_SYNC) LEAVE(INVALID_VALUE);
    struct object *object = malloc(sizeof *object);
    *object = (struct object){destroy, data, references};
    *out = object;
    LEAVE(SUCCESS);
}

int cudaUserObjectRelease(struct object *object, unsigned count) {
    ENTER;
    if (!count || count > object->references) LEAVE(INVALID_VALUE);
    release(object, count);
    LEAVE(SUCCESS);
}

int cudaGraphRetainUserObject(struct graph *graph, struct object *object, unsigned count, unsigned flags) {
    ENTER;
    if (count != 1 || flags > MOVE || graph->object) LEAVE(INVALID_VALUE);
    if (!(flags & MOVE)) object->references++;
    graph->object = object;
    LEAVE(SUCCESS);
}
#endif
