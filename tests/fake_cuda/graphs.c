/* Graphs, executable graphs, and user objects, to which both have references of their own. */
#include <stdlib.h>

#include "fake.h"

enum { MOVE = 1, NO_DESTRUCTOR_SYNC = 1 };

struct graph *fake_graph(void) { return calloc(1, sizeof(struct graph)); }

size_t fake_add_node(struct graph *graph, struct work work, const struct places *after) {
    work.after = (struct places){NULL, 0};
    fake_add_places(&work.after, after);
    graph->nodes = realloc(graph->nodes, (graph->count + 1) * sizeof *graph->nodes);
    graph->nodes[graph->count] = work;
    return graph->count++;
}

/* A destructor runs on the thread of the host functions, some time. */
static void release(struct object *object, unsigned count) {
    object->references -= count;
    if (object->references) return;
    fake_on_host_thread(object->destroy, object->data, NULL);
    free(object);
}

static void empty(struct graph *graph) {
    for (size_t node = 0; node < graph->count; node++) fake_no_places(&graph->nodes[node].after);
    for (size_t i = 0; i < graph->owned; i++) release(graph->objects[i], 1);
    free(graph->nodes);
    free(graph->objects);
}

void fake_dispose(struct graph *graph) {
    empty(graph);
    free(graph);
}

void fake_unreference(struct executable *executable) {
    if (--executable->references) return;
    empty(&executable->graph);
    free(executable);
}

static void own(struct graph *graph, struct object *object) {
    graph->objects = realloc(graph->objects, (graph->owned + 1) * sizeof(struct object *));
    graph->objects[graph->owned++] = object;
}

int cudaGraphInstantiateWithFlags(struct executable **out, const struct graph *graph, unsigned long long flags) {
    (void)flags;
    ENTER;
    struct executable *executable = calloc(1, sizeof *executable);
    executable->references = 1;
    for (size_t i = 0; i < graph->count; i++) {
        fake_add_node(&executable->graph, graph->nodes[i], &graph->nodes[i].after);
    }
    for (size_t i = 0; i < graph->owned; i++) {
        graph->objects[i]->references++;
        own(&executable->graph, graph->objects[i]);
    }
    *out = executable;
    LEAVE(SUCCESS);
}

int cudaGraphDestroy(struct graph *graph) {
    ENTER;
    fake_dispose(graph);
    LEAVE(SUCCESS);
}

/* What a launch that is under way needs stays until it is over. */
int cudaGraphExecDestroy(struct executable *executable) {
    ENTER;
    fake_unreference(executable);
    LEAVE(SUCCESS);
}

int cudaGraphLaunch(struct executable *executable, void *handle) {
    ENTER;
    struct stream *stream = fake_stream(handle);
    if (stream && stream->capture) LEAVE(fake_conflict(stream)); /* CUDA would add a child graph */
    error = fake_put(handle, (struct work){.kind = LAUNCH, .executable = executable, .turn = executable->turns});
    if (!error) {
        executable->turns++;
        executable->references++;
    }
    LEAVE(error);
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

int cudaUserObjectRetain(struct object *object, unsigned count) {
    ENTER;
    object->references += count;
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
    if (!count || flags > MOVE) LEAVE(INVALID_VALUE);
    if (!(flags & MOVE)) object->references += count;
    while (count--) own(graph, object);
    LEAVE(SUCCESS);
}
#endif
