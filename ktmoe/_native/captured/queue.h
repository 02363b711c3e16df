/* Calls of replayed CUDA graphs, run in order by one thread. CUDA's threads call what a host function calls: that never waits for
 * Python nor calls CUDA. */
#ifndef KT_QUEUE_H
#define KT_QUEUE_H

#include "captured/record.h"

/* Starts the thread, unless it runs. 0, or an errno; ECANCELED after kt_queue_close(). */
int kt_queue_start(void);

/* Host functions; argument: a kt_record. The first queues it and returns. The second waits until the y is there of the last call
 * that was queued. */
void kt_queue_submit(void *record);
void kt_queue_await(void *record);

/* Is called before the process ends: waits for the call that runs and ends the thread. Other calls are dropped, nobody waits
 * any more, and host functions return without touching their record. */
void kt_queue_close(void);

bool kt_queue_idle(const kt_record *r); /* it is neither queued nor run */
void kt_queue_forget(kt_record *r);     /* waits until it is, and drops its outcome */
size_t kt_queue_failures(void);         /* of how many records nobody has taken the outcome yet that is not KT_DONE */
enum kt_outcome kt_queue_take_outcome(kt_record *r, int *error); /* how it failed since the last time, if it did */

/* Says whether a graph is still there: its owner and the graph hold it, and whoever drops it last frees it. */
typedef struct kt_mark {
    _Atomic uint32_t holders;
} kt_mark;
kt_mark *kt_mark_make(void); /* with one holder; NULL: there is no memory */
void kt_mark_hold(kt_mark *mark);
void kt_mark_drop(void *mark); /* a host function, too */

#endif
