/* Pages, threads, sleeping and the clock: the only file that knows the operating system (Linux). */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <linux/mempolicy.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/numbers.h"
#include "base/os.h"
#include "sanitizer.h"

/* What is mapped for so many bytes: whole huge pages, unless that would be a sixteenth more, as for a model's many small
 * matrices. Then the last part is of small pages. */
static size_t mapped_bytes(size_t bytes) {
    const size_t huge = kt_round_up(bytes, KT_HUGE_BYTES);
    return huge - bytes <= bytes / 16 ? huge : kt_round_up(bytes, KT_PAGE_BYTES);
}

void *kt_os_map(size_t wanted) {
    const size_t bytes = mapped_bytes(wanted);
    if (bytes == 0 || bytes > SIZE_MAX / 2) return NULL;
    const size_t span = bytes + KT_HUGE_BYTES;
    uint8_t *p = mmap(NULL, span, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
    /* Give back what lies before and behind the aligned part. */
    const size_t before = kt_round_up((uintptr_t)p, KT_HUGE_BYTES) - (uintptr_t)p;
    if (before) munmap(p, before);
    if (span - before - bytes) munmap(p + before + bytes, span - before - bytes);
    p += before;
    madvise(p, bytes, MADV_HUGEPAGE); /* advice: where it is refused, 4 KiB pages serve */
    kt_forbid(p + wanted, bytes - wanted);
    return p;
}

void *kt_os_map_on(int node, size_t bytes) {
    enum { NODES = 1024, BITS = 8 * sizeof(unsigned long) }; /* as many as Linux can be built for */
    unsigned long wanted[NODES / BITS] = {0};
    void *p = kt_os_map(bytes);
    if (!p || node < 0 || node >= NODES) return p;
    wanted[node / BITS] = 1ul << node % BITS;
    syscall(SYS_mbind, p, mapped_bytes(bytes), MPOL_PREFERRED, wanted, NODES + 1ul, 0);
    return p;
}

void kt_os_unmap(void *p, size_t bytes) {
    if (!p) return;
    kt_permit(p, mapped_bytes(bytes));
    munmap(p, mapped_bytes(bytes));
}

bool kt_os_file_state(int fd, kt_file_state *state) {
    struct stat s;
    if (fstat(fd, &s)) return false;
    *state = (kt_file_state){(uint64_t)s.st_size, (uint64_t)s.st_mtim.tv_sec, (uint64_t)s.st_mtim.tv_nsec};
    return true;
}

int kt_os_hold(int fd) { return fcntl(fd, F_DUPFD_CLOEXEC, 0); }

void kt_os_let_go(int fd) {
    if (fd >= 0) close(fd);
}

void *kt_os_map_file(int fd, uint64_t offset, size_t bytes) {
    if (bytes == 0 || bytes > SIZE_MAX / 2 || offset > INT64_MAX - bytes) {
        errno = EINVAL;
        return NULL;
    }
    const size_t within = offset % KT_HUGE_BYTES, span = kt_round_up(bytes, KT_PAGE_BYTES) + KT_HUGE_BYTES;
    /* Addresses whose huge pages begin where the file's do. */
    uint8_t *p = mmap(NULL, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return NULL;
    const size_t before = (within + KT_HUGE_BYTES - (uintptr_t)p % KT_HUGE_BYTES) % KT_HUGE_BYTES;
    const size_t after = span - before - kt_round_up(bytes, KT_PAGE_BYTES);
    if (before) munmap(p, before);
    if (after) munmap(p + span - after, after);
    p += before;
    const int flags = MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED;
    if (mmap(p, bytes, PROT_READ | PROT_WRITE, flags, fd, (off_t)offset) == MAP_FAILED) {
        munmap(p, bytes);
        return NULL;
    }
    /* Where the file system has pages of that size, the page cache reads and maps them; else it reads as much at a time. */
    madvise(p, bytes, MADV_HUGEPAGE);
    return p;
}

void kt_os_unmap_file(void *p, size_t bytes) {
    if (!p) return;
    kt_permit(p, bytes);
    munmap(p, bytes);
}

bool kt_os_bind(const kt_cpus *cpus, kt_cpus *before) {
    if (before) {
        *before = (kt_cpus){{0}};
        if (sched_getaffinity(0, sizeof before->words, (cpu_set_t *)before->words)) return false;
    }
    return sched_setaffinity(0, sizeof cpus->words, (const cpu_set_t *)cpus->words) == 0;
}

bool kt_os_process_cpus(kt_cpus *cpus) {
    *cpus = (kt_cpus){{0}};
    return sched_getaffinity(getpid(), sizeof cpus->words, (cpu_set_t *)cpus->words) == 0; /* its first thread has its number */
}

int kt_os_start(pthread_t *id, void *(*work)(void *), void *argument) {
    static const int own[] = {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGTRAP};
    sigset_t block, old;
    sigfillset(&block);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) sigdelset(&block, own[i]);
    pthread_sigmask(SIG_SETMASK, &block, &old);
    const int error = pthread_create(id, NULL, work, argument);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return error;
}

void kt_os_wait(_Atomic uint32_t *word, uint32_t while_equal) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, while_equal, NULL, NULL, 0);
}

void kt_os_wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0); }

int kt_os_permit_tiles(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 }; /* asm/prctl.h may be older than the running system */
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) ? errno : 0;
}

void kt_os_yield(void) { sched_yield(); }

uint64_t kt_os_nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
