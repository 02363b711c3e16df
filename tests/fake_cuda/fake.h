/* A stand-in for the CUDA runtime: streams are queues with a thread each, all host functions run on one more thread.

   What each call does, and what it forbids while a stream is captured, follows the comments of cuda_runtime_api.h 11.8, 12.9
   and 13.5. Where CUDA leaves something open, the stand-in takes what is worst for a caller: all host functions and destructors
   of user objects share one thread, and nodes of a graph that do not depend on each other run in any order. It has what the tests
   need: one capture at a time, of at most 256 nodes, and graphs with at most one user object.

   FAKE_CUDA: the version whose names it has, 1102, 11, 12 or 13. Functions in fakeX are not CUDA's: tests give orders by them. */
#ifndef FAKE_H
#define FAKE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifndef FAKE_CUDA
#define FAKE_CUDA 12
#endif

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INITIALIZATION = 3,
    NOT_PERMITTED = 800,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURED_EVENT = 907,
};
enum { MODE_GLOBAL, MODE_THREAD_LOCAL, MODE_RELAXED };

typedef void (*host_function)(void *data);

/* A set of nodes of a graph. */
enum { NODES = 256 };
struct nodes {
    uint64_t bits[NODES / 64];
};

/* One thing to do, in a stream or as a node of a graph. */
struct work {
    enum { COPY, HOST, KERNEL, WAIT, LAUNCH } kind;
    void *target; /* COPY, KERNEL */
    const void *source, *other;
    size_t bytes;
    int kernel;
    host_function function; /* HOST */
    void *data;
    struct stream *stream; /* WAIT: for so much of it */
    uint64_t until;
    struct graph *graph; /* LAUNCH */
    uint64_t turn;
    struct nodes after; /* in a graph */
    struct work *next;  /* in a stream */
};

struct object {
    host_function destroy;
    void *data;
    uint64_t references;
};

/* A graph and what was instantiated of it. references: a handle's each, and one for each launch; launches: that were asked for,
   done: that are over. */
struct graph {
    struct work *nodes;
    size_t count;
    struct object *object;
    uint64_t references, launches, done;
};

/* queued: how many works were ever put into it, done: how many are over. */
struct stream {
    struct work *first, *last;
    uint64_t queued, done;
    bool runs, captured;
    struct nodes tails; /* what the next node comes after */
    struct stream *next;
};

struct event {
    struct stream *stream; /* NULL: not recorded yet */
    uint64_t until;
    uint64_t capture; /* id of the capture that recorded it, or 0 */
    struct nodes tails;
};

/* All below are for whoever holds fake_lock. fake_changed: something got further. */
extern pthread_mutex_t fake_lock;
extern pthread_cond_t fake_changed;

/* Every function of CUDA begins with ENTER and ends with LEAVE. */
int fake_enter(const char *name);
int fake_leave(int error);
void fake_violation(const char *what, const char *name);
#define ENTER                         \
    int error = fake_enter(__func__); \
    if (error) return fake_leave(error)
#define LEAVE(value) return fake_leave(value)

/* captures.c. fake_unsafe: for calls that no thread may make while somebody captures; they invalidate the capture. */
int fake_unsafe(void);
int fake_captured(struct stream *stream, const struct work *work);
uint64_t fake_capture_of(const struct stream *stream);

/* graphs.c */
struct graph *fake_graph(void);
void fake_unreference(struct graph *graph);

/* streams.c; the default stream is fake_stream(NULL). */
extern struct stream *fake_streams;
extern _Thread_local bool fake_is_host_thread;
struct stream *fake_stream(void *handle);
int fake_put(void *handle, struct work work);
void fake_on_host_thread(host_function function, void *data, bool *over);
void fake_everything_done(void);

bool fake_usable(const struct work *work); /* memory.c: what a copy works on is there */
void fake_kernel(const struct work *work); /* kernels.c */

#endif
