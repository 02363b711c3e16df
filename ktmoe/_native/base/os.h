/* What is asked of the operating system: pages, CPUs, threads, sleeping, the clock, AMX's tiles. */
#ifndef KT_OS_H
#define KT_OS_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { KT_PAGE_BYTES = 4096, KT_HUGE_BYTES = 2 << 20 }; /* of pages: the least that can be mapped, and huge ones */
void *kt_os_map(size_t bytes);                          /* zeroed, 2 MiB aligned, huge pages asked for; NULL when refused */
/* The same in a NUMA node's memory while it has some, whoever touches it first. Below 0, or where a container forbids the system call,
 * it is as kt_os_map(). */
void *kt_os_map_on(int node, size_t bytes);
void kt_os_unmap(void *p, size_t bytes);

/* A file as it is now, by its descriptor. */
typedef struct kt_file_state {
    uint64_t bytes, seconds, nanoseconds; /* its size, and when its contents were last changed */
} kt_file_state;
bool kt_os_file_state(int fd, kt_file_state *state);
int kt_os_hold(int fd);    /* another descriptor of the same open file, or -1 */
void kt_os_let_go(int fd); /* closes it; nothing for -1 */
/* A file's bytes from `offset` on, a multiple of KT_PAGE_BYTES: they are read when they are touched, what is written stays in this
 * process. Huge pages are asked for, which need an offset that is a multiple of theirs. NULL when refused; errno says why. */
void *kt_os_map_file(int fd, uint64_t offset, size_t bytes);
void kt_os_unmap_file(void *p, size_t bytes);

enum { KT_CPU_WORDS = 64 };
typedef struct kt_cpus {
    uint64_t words[KT_CPU_WORDS]; /* a bit for each logical CPU */
} kt_cpus;
/* Keep this thread to these CPUs; *before, unless NULL, gets where it was kept until now. False where the system refuses. */
bool kt_os_bind(const kt_cpus *cpus, kt_cpus *before);
/* Where the process's first thread may run; with the pool's lock held, since a run may keep that thread elsewhere. */
bool kt_os_process_cpus(kt_cpus *cpus);

/* A thread that gets no signals but those that its own instructions raise: the others are the interpreter's. 0 or an errno. */
int kt_os_start(pthread_t *id, void *(*work)(void *), void *argument);

void kt_os_wait(_Atomic uint32_t *word, uint32_t while_equal);
void kt_os_wake(_Atomic uint32_t *word); /* all waiters */
uint64_t kt_os_nanoseconds(void);
void kt_os_yield(void); /* to another thread that can run */
/* Ask, for the whole process, to use AMX's tiles, which make signal frames 8 KiB larger; 0 or the errno of a refusal. */
int kt_os_permit_tiles(void);

#endif
