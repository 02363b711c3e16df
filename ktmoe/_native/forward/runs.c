/* A worker goes from item to item of the runs that it takes. */
#include "forward/runs.h"

#include "base/os.h"
#include "forward/tuning.h"

size_t kt_run_advance(const kt_list *list, kt_hand *hand, kt_run *run, size_t items) {
    const size_t next = run->first += items;
    if (run->first < run->end) return next;
    if (items && kt_list_rounds_left(list, hand) == 1) return next;
    if (kt_moe_tuning.by_turns) kt_os_yield();
    *run = kt_list_take(list, hand);
    return next;
}
