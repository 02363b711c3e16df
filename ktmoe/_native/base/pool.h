/* One pool of threads for the process. Callers take turns by its lock; the caller is worker 0. */
#ifndef KT_POOL_H
#define KT_POOL_H

#include "base/placement.h"

typedef void (*kt_task)(void *context, size_t worker, size_t workers);

void kt_pool_lock(void);
void kt_pool_unlock(void);
/* Take effect at the next run. chosen: the user said how many, so that placements' own numbers do not count. */
void kt_pool_configure(size_t threads, bool chosen, uint64_t spin_ns);
size_t kt_pool_threads(void);

/* With the lock held. Another placement, or another width, stops the workers and starts others. */
size_t kt_pool_width(const kt_placement *placement); /* threads that the next run has */
int kt_pool_run(kt_task task, void *context,
                const kt_placement *placement); /* 0, or the errno of a thread that could not start */
void kt_pool_stop(void);                        /* ends the idle workers; the next run starts others */
void kt_pool_barrier(kt_team team);             /* inside a task: all workers of that team */

#endif
