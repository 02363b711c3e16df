/* How every call begins and ends: errors that a test ordered, calls from where CUDA forbids them, and what the tests ask. */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "fake.h"

pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t fake_changed = PTHREAD_COND_INITIALIZER;

static struct {
    char name[64];
    int error, skip;
} ordered;
static char violations[4096];
static pid_t owner;
static _Thread_local int last_error;

void fake_violation(const char *what, const char *name) {
    size_t used = strlen(violations);
    snprintf(violations + used, sizeof violations - used, "%s: %s\n", name, what);
}

/* Returns with fake_lock held, whatever it returns: fake_leave() gives it back. */
int fake_enter(const char *name) {
    if (owner && owner != getpid()) return -INITIALIZATION; /* a forked child, where nobody may touch the lock */
    pthread_mutex_lock(&fake_lock);
    owner = getpid();
    if (fake_is_host_thread) {
        fake_violation("called by a host function or a destructor", name);
        return NOT_PERMITTED;
    }
    if (!ordered.error || strcmp(ordered.name, name) || ordered.skip--) return SUCCESS;
    const int error = ordered.error;
    ordered.error = 0;
    return error;
}

int fake_leave(int error) {
    if (error == -INITIALIZATION) return INITIALIZATION;
    if (error) last_error = error;
    pthread_mutex_unlock(&fake_lock);
    return error;
}

int cudaGetLastError(void) {
    const int error = last_error;
    last_error = SUCCESS;
    return error;
}

int cudaRuntimeGetVersion(int *version) {
    ENTER;
    *version = FAKE_CUDA == 1102 ? 11020 : FAKE_CUDA * 1000 + 90;
    LEAVE(SUCCESS);
}

const char *cudaGetErrorString(int error) {
    switch (error) {
        case INVALID_VALUE: return "invalid argument";
        case OUT_OF_MEMORY: return "out of memory";
        case INITIALIZATION: return "initialization error";
        case CAPTURE_UNSUPPORTED: return "operation not permitted when stream is capturing";
        case CAPTURE_INVALIDATED: return "operation failed due to a previous error during capture";
        case CAPTURED_EVENT: return "operation not permitted on an event last recorded in a capturing stream";
        default: return "unrecognized error code";
    }
}

/* The call after the next `skip` ones of this name returns `error`, and does nothing. */
void fakeFail(const char *name, int error, int skip) {
    pthread_mutex_lock(&fake_lock);
    snprintf(ordered.name, sizeof ordered.name, "%s", name);
    ordered.error = error;
    ordered.skip = skip;
    pthread_mutex_unlock(&fake_lock);
}

/* What was done that CUDA forbids, one line each, into text[4096]; it is forgotten then, as is an error that did not come. */
void fakeViolations(char *text) {
    pthread_mutex_lock(&fake_lock);
    memcpy(text, violations, sizeof violations);
    violations[0] = 0;
    ordered.error = 0;
    pthread_mutex_unlock(&fake_lock);
}
