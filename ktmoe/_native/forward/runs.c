/* A worker goes from item to item of the runs that it takes. */
#include "forward/job.h"
#include "forward/tuning.h"

size_t kt_advance(kt_worker_job *w, kt_phase phase, size_t items) {
    kt_run *run = &w->runs[phase];
    const size_t next = run->first += items;
    if (run->first < run->end) return next;
    if (items && kt_list_rounds_left(&w->shard->lists->of[phase], &w->lists[phase]) == 1) return next;
    if (kt_moe_tuning.by_turns) kt_os_yield();
    *run = kt_list_take(&w->shard->lists->of[phase], &w->lists[phase]);
    return next;
}
