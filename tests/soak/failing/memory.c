/* Memory and threads, as far as code of chosen modules asks for them: the return address tells. See failing.h. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "failing.h"

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);
void __libc_free(void *);

enum { RANGES = 16 };
static struct range {
    uintptr_t begin, end;
    unsigned bit;
    bool counts; /* whether what it holds is counted */
} ranges[RANGES];
static _Atomic size_t num_ranges;
static _Atomic unsigned refusing;
static _Atomic long allocations, mapped;

/* Code in [begin, end) is a module's, which has this bit. */
void failing_module(uintptr_t begin, uintptr_t end, unsigned bit, bool counts) {
    ranges[num_ranges] = (struct range){begin, end, bit, counts};
    num_ranges++;
}

/* Only modules with these bits are refused anything. */
void failing_refuse(unsigned bits) { refusing = bits; }

/* What the counted modules hold: allocations, and bytes that are mapped. */
long failing_allocations(void) { return allocations; }
long failing_mapped(void) { return mapped; }

static long whole_pages(size_t bytes) { return (long)((bytes + 4095) / 4096 * 4096); }

static const struct range *caller(void *address) {
    for (size_t i = 0; i < num_ranges; i++)
        if (ranges[i].begin <= (uintptr_t)address && (uintptr_t)address < ranges[i].end) return &ranges[i];
    return NULL;
}

static bool refused(const struct range *of, enum kind kind, const char *name) {
    if (!of || !(of->bit & refusing) || failing_now(kind, name) == NOTHING) return false;
    errno = failing_error();
    return true;
}

static void *counted(const struct range *of, void *p) {
    if (of && of->counts && p) allocations++;
    return p;
}

#define CALLER caller(__builtin_return_address(0))

void *malloc(size_t bytes) {
    const struct range *of = CALLER;
    return refused(of, ALLOCATE, "malloc") ? NULL : counted(of, __libc_malloc(bytes));
}

void *calloc(size_t count, size_t bytes) {
    const struct range *of = CALLER;
    return refused(of, ALLOCATE, "calloc") ? NULL : counted(of, __libc_calloc(count, bytes));
}

void *realloc(void *p, size_t bytes) {
    const struct range *of = CALLER;
    if (refused(of, ALLOCATE, "realloc")) return NULL;
    return p ? __libc_realloc(p, bytes) : counted(of, __libc_malloc(bytes));
}

void *aligned_alloc(size_t alignment, size_t bytes) {
    const struct range *of = CALLER;
    return refused(of, ALLOCATE, "aligned_alloc") ? NULL : counted(of, __libc_memalign(alignment, bytes));
}

int posix_memalign(void **p, size_t alignment, size_t bytes) {
    const struct range *of = CALLER;
    if (refused(of, ALLOCATE, "posix_memalign")) return ENOMEM;
    *p = counted(of, __libc_memalign(alignment, bytes));
    return *p ? 0 : ENOMEM;
}

void free(void *p) {
    const struct range *of = CALLER;
    if (of && of->counts && p) allocations--;
    __libc_free(p);
}

void *mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    const struct range *of = CALLER;
    if (refused(of, fd < 0 ? MAP : MAP_OF_FILE, "mmap")) return MAP_FAILED;
    void *p = (void *)syscall(SYS_mmap, at, bytes, protection, flags, fd, offset);
    if (of && of->counts && p != MAP_FAILED && !(flags & MAP_FIXED)) mapped += whole_pages(bytes);
    return p;
}

void *mmap64(void *, size_t, int, int, int, off_t) __attribute__((alias("mmap")));

int munmap(void *p, size_t bytes) {
    const struct range *of = CALLER;
    if (of && of->counts) mapped -= whole_pages(bytes);
    return (int)syscall(SYS_munmap, p, bytes);
}

int madvise(void *p, size_t bytes, int advice) {
    if (refused(CALLER, HINT, "madvise")) return -1;
    return (int)syscall(SYS_madvise, p, bytes, advice);
}

int pthread_create(pthread_t *id, const pthread_attr_t *attributes, void *(*work)(void *), void *argument) {
    if (failing_now(THREAD, "pthread_create") != NOTHING) return EAGAIN; /* whoever asks: Python's threads, too */
    return NEXT(pthread_create)(id, attributes, work, argument);
}

long syscall(long number, ...) {
    long a[6];
    va_list list;
    va_start(list, number);
    for (size_t i = 0; i < 6; i++) a[i] = va_arg(list, long);
    va_end(list);
    if (number == SYS_mbind && refused(CALLER, HINT, "mbind")) return -1;
    static __typeof__(&syscall) _Atomic next;
    __typeof__(&syscall) real = next;
    if (!real) next = real = NEXT(syscall);
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
