/* A library that stands before the system's: it counts calls of chosen kinds, and lets one of them fail, or kill the process. */
#ifndef FAILING_H
#define FAILING_H

#include <dlfcn.h>
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>

/* Kinds of calls; tests/soak/failing_calls.py has them in this order. */
enum kind {
    ALLOCATE = 1 << 0, /* malloc and its like */
    MAP = 1 << 1,      /* memory */
    MAP_OF_FILE = 1 << 2,
    THREAD = 1 << 3,
    HINT = 1 << 4, /* what may be refused without an error: mbind, madvise */
    OPEN = 1 << 5,
    READ = 1 << 6,
    WRITE = 1 << 7,
    SYNC = 1 << 8,
    NAME = 1 << 9, /* rename, unlink, rmdir, mkdir */
    TRUNCATE = 1 << 10,
    LOCK = 1 << 11,
    STATUS = 1 << 12,
    LIST = 1 << 13,
    CLOSE = 1 << 14,
    ARRAY = 1 << 15 /* numpy's */
};

/* What happens to the call. FEWER: a read or a write of half the bytes. KILL: before it; of a write, when half is done. */
enum how { NOTHING, FAIL, FEWER, KILL };

/* What is to happen to this call, which is counted. name: for messages. */
enum how failing_now(enum kind kind, const char *name);

/* The error that errno gets. */
int failing_error(void);

void failing_die(void);

/* The next library's function. */
#define NEXT(name) ((__typeof__(&name))failing_next(#name))
void *failing_next(const char *name);

#endif
