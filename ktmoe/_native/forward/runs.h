/* How a worker goes from run to run of a list. */
#ifndef KT_RUNS_H
#define KT_RUNS_H

#include "forward/schedule.h"

/* Takes so many items of the worker's run, and the next run with the last of them: what a kernel fetches ahead is the worker's own, and
 * no other one reads it. In a list's last round it takes the next run only when it has none, with no items. Returns the item after
 * them. */
size_t kt_run_advance(const kt_list *list, kt_hand *hand, kt_run *run, size_t items);

#endif
