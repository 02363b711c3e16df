/* How every call begins and ends: errors that a test ordered, calls from where CUDA forbids them, and what the tests ask. */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "fake.h"

enum { NAMES = 64, LENGTH = 64, TEXT = 4096 };

pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t fake_changed = PTHREAD_COND_INITIALIZER;

static struct {
    char name[LENGTH];
    uint64_t calls;
    int error, skip; /* the error that a test ordered, after so many calls */
} functions[NAMES];
static char violations[TEXT];
static pid_t owner;
static _Thread_local int last_error;

static int find(const char *name) {
    int place = 0;
    while (place < NAMES - 1 && functions[place].name[0] && strcmp(functions[place].name, name)) place++;
    snprintf(functions[place].name, LENGTH, "%s", name);
    return place;
}

void fake_violation(const char *what, const char *name) {
    size_t used = strlen(violations);
    snprintf(violations + used, TEXT - used, "%s: %s\n", name, what);
}

/* Returns with fake_lock held, whatever it returns: fake_leave() gives it back. */
int fake_enter(const char *name) {
    if (owner && owner != getpid()) return -INITIALIZATION; /* a forked child, where nobody may touch the lock */
    pthread_mutex_lock(&fake_lock);
    owner = getpid();
    const int place = find(name);
    functions[place].calls++;
    if (fake_is_host_thread) {
        fake_violation("called by a host function or a destructor", name);
        return NOT_PERMITTED;
    }
    if (functions[place].error && functions[place].skip-- == 0) {
        const int error = functions[place].error;
        functions[place].error = 0;
        return error;
    }
    return SUCCESS;
}

int fake_leave(int error) {
    if (error == -INITIALIZATION) return INITIALIZATION;
    if (error && error != NOT_READY) last_error = error;
    pthread_mutex_unlock(&fake_lock);
    return error;
}

/* CUDA's; they clear or leave the last error of the calling thread. */

int cudaGetLastError(void) {
    const int error = last_error;
    last_error = SUCCESS;
    return error;
}

int cudaPeekAtLastError(void) { return last_error; }

int cudaRuntimeGetVersion(int *version) {
    ENTER;
    *version = FAKE_CUDA == 1102 ? 11020 : FAKE_CUDA * 1000 + 90;
    LEAVE(SUCCESS);
}

const char *cudaGetErrorString(int error) {
    switch (error) {
        case SUCCESS: return "no error";
        case INVALID_VALUE: return "invalid argument";
        case OUT_OF_MEMORY: return "out of memory";
        case INITIALIZATION: return "initialization error";
        case INVALID_HANDLE: return "invalid resource handle";
        case NOT_READY: return "device not ready";
        case NOT_PERMITTED: return "operation not permitted";
        case CAPTURE_UNSUPPORTED: return "operation not permitted when stream is capturing";
        case CAPTURE_INVALIDATED: return "operation failed due to a previous error during capture";
        case CAPTURE_MERGE: return "operation would result in a merge of separate capture sequences";
        case CAPTURE_UNMATCHED: return "capture was not ended in the same stream as it began";
        case CAPTURE_UNJOINED: return "capturing stream has unjoined work";
        case CAPTURE_ISOLATION: return "dependency created on uncaptured work in another stream";
        case CAPTURED_EVENT: return "operation not permitted on an event last recorded in a capturing stream";
        case CAPTURE_WRONG_THREAD: return "attempt to terminate a thread-local capture sequence from another thread";
        default: return "unrecognized error code";
    }
}

/* The tests'. */

/* The call after the next `skip` ones of this name returns `error`, and does nothing. */
void fakeFail(const char *name, int error, int skip) {
    pthread_mutex_lock(&fake_lock);
    const int place = find(name);
    functions[place].error = error;
    functions[place].skip = skip;
    pthread_mutex_unlock(&fake_lock);
}

uint64_t fakeCalls(const char *name) {
    pthread_mutex_lock(&fake_lock);
    const uint64_t calls = functions[find(name)].calls;
    pthread_mutex_unlock(&fake_lock);
    return calls;
}

/* What was done that CUDA forbids, one line each, into text[size]; it is forgotten then, as are errors that did not come. */
void fakeViolations(char *text, size_t size) {
    pthread_mutex_lock(&fake_lock);
    snprintf(text, size, "%s", violations);
    violations[0] = 0;
    for (int place = 0; place < NAMES; place++) functions[place].error = 0;
    pthread_mutex_unlock(&fake_lock);
}
