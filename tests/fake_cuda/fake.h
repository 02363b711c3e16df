/* A stand-in for the CUDA runtime: streams are queues with a thread each, all host functions run on one more thread.

   What each call does, and what it forbids while a stream is captured, follows the comments of cuda_runtime_api.h 11.8, 12.9
   and 13.5. Where CUDA leaves something open, the stand-in takes what is worst for a caller: all host functions and destructors
   of user objects share one thread, and nodes of a graph that do not depend on each other run in any order.

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
    INVALID_HANDLE = 400,
    NOT_READY = 600,
    NOT_PERMITTED = 800,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_MERGE = 902,
    CAPTURE_UNMATCHED = 903,
    CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905,
    CAPTURED_EVENT = 907,
    CAPTURE_WRONG_THREAD = 908,
};
enum { MODE_GLOBAL, MODE_THREAD_LOCAL, MODE_RELAXED };
enum { STATUS_NONE, STATUS_ACTIVE, STATUS_INVALIDATED };

typedef void (*host_function)(void *data);

/* Nodes of a graph that something comes after. */
struct places {
    size_t *at, count;
};

void fake_add_place(struct places *places, size_t place);
void fake_add_places(struct places *places, const struct places *others);
void fake_no_places(struct places *places);

struct block;
struct stream;
struct executable;

/* One thing to do, in a stream or as a node of a graph. */
struct work {
    enum { COPY, HOST, KERNEL, WAIT, LAUNCH } kind;
    struct places after; /* in a graph */
    void *target;        /* COPY, KERNEL */
    const void *source, *other;
    size_t bytes;
    int kernel;
    host_function function; /* HOST */
    void *data;
    struct stream *stream; /* WAIT: for so much of it */
    uint64_t until;
    struct executable *executable; /* LAUNCH */
    uint64_t turn;
};

struct object {
    host_function destroy;
    void *data;
    uint64_t references;
};

struct graph {
    struct work *nodes;
    size_t count, room;
    struct object **objects; /* one entry a reference */
    size_t owned;
};

/* turns: launches that were asked for, done: those that are over. references: the handle's and one for each launch. */
struct executable {
    struct graph graph;
    uint64_t turns, done, references;
};

struct capture {
    uint64_t id;
    int mode, status;
    pthread_t thread;
    struct stream *origin;
    struct graph *graph;
    struct capture *next;
};

/* queued: how many works were ever put into it, done: how many are over. */
struct stream {
    struct item *first, *last;
    uint64_t queued, done;
    bool runs;
    struct capture *capture;
    struct places tails; /* what the next node comes after */
    struct stream *next;
};

struct event {
    struct stream *stream; /* NULL: not recorded yet */
    uint64_t until;
    uint64_t capture; /* id of the capture that recorded it, or 0 */
    struct places tails;
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

/* captures.c. fake_unsafe: for calls that no thread may make while somebody captures; fake_conflict: for those that a stream
   that is captured cannot take in any mode. Both invalidate the capture. */
int fake_unsafe(void);
int fake_conflict(struct stream *stream);
int fake_captured(struct stream *stream, struct work work);

/* graphs.c */
struct graph *fake_graph(void);
size_t fake_add_node(struct graph *graph, struct work work, const struct places *after);
void fake_dispose(struct graph *graph);
void fake_unreference(struct executable *executable);

/* streams.c. fake_streams: all but the default one, which is fake_stream(NULL). */
extern struct stream *fake_streams;
extern _Thread_local bool fake_is_host_thread;
struct stream *fake_stream(void *handle);
int fake_put(void *handle, struct work work);
void fake_on_host_thread(host_function function, void *data, bool *over);
void fake_everything_done(void);

/* memory.c: fake_use() takes what a copy works on, and says whether it is there; fake_unuse() gives it back. */
bool fake_use(const struct work *work);
void fake_unuse(const struct work *work);

/* kernels.c */
void fake_kernel(const struct work *work);

#endif
