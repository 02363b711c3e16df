/* One pool of threads for the process. Callers take turns by its lock; the caller is worker 0. */
#ifndef KT_POOL_H
#define KT_POOL_H

#include "base/teams.h"

/* Workers may come late or not at all: what a team has to do is done by whoever of it comes, one worker at least. Worker 0 always
 * does. */
typedef void (*kt_task)(void *context, const kt_worker *me);

void kt_pool_lock(void);
void kt_pool_unlock(void);
/* Sets what the next run begins with. chosen: the user said how many, so that placements' own numbers do not count. everywhere:
 * of one shard, what a placement of NULL stands for. */
void kt_pool_configure(size_t threads, bool chosen, uint64_t spin_ns, const kt_placement *everywhere);
size_t kt_pool_threads(void);

/* The caller of these holds the lock. Another placement, or another number of threads, stops the workers and starts others. */
const kt_teams *kt_pool_teams(const kt_placement *placement); /* that the next run has; NULL: there is no memory */
int kt_pool_run(kt_task task, void *context,
                const kt_placement *placement); /* 0, or the errno of a thread that could not start */
void kt_pool_stop(void);                        /* ends the idle workers; the next run starts others */

#endif
