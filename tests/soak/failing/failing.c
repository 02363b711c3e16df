/* What tests tell this library, and the count. See failing.h. */
#define _GNU_SOURCE
#include "failing.h"

#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>

static _Atomic unsigned wanted_kinds;
static _Atomic long calls;
static long first;
static bool lasting;
static int error;
static enum how what;
static const char *_Atomic hit;

/* From now on count calls of these kinds; to call `at`, and with `forever` to all after it, this happens. */
void failing_begin(unsigned kinds, long at, enum how how, int number, bool forever) {
    first = at, what = how, error = number, lasting = forever;
    hit = NULL;
    calls = 0;
    wanted_kinds = kinds;
}

/* The number of calls that were counted. */
long failing_end(void) {
    wanted_kinds = 0;
    return calls;
}

/* The name of the function that failed first, or NULL. */
const char *failing_hit(void) { return hit; }

enum how failing_now(enum kind kind, const char *name) {
    if (!(wanted_kinds & kind)) return NOTHING;
    const long number = atomic_fetch_add(&calls, 1);
    if (number < first || (number > first && !lasting)) return NOTHING;
    if (!hit) hit = name;
    return what;
}

int failing_error(void) { return error; }

void failing_die(void) {
    kill(getpid(), SIGKILL);
    pause();
}

void *failing_next(const char *name) { return dlsym(RTLD_NEXT, name); }
