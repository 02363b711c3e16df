/* One step by the pool's workers: each takes the next item until there are none. */
#include "backward/job.h"
#include "base/pool.h"
#include "forward/tuning.h"

static void take(const kt_back_worker *w, kt_back_shard *from) {
    const kt_step *step = w->job->step;
    const size_t items = step->items(w->job, from);
    for (size_t i; (i = atomic_fetch_add_explicit(&from->next, 1, memory_order_relaxed)) < items;) {
        step->item(w, i);
        if (kt_moe_tuning.by_turns) kt_os_yield();
    }
}

static void work(void *context, const kt_worker *me) {
    kt_back_job *j = context;
    const kt_isa *isa = j->layer->isa;
    if (isa->enter) isa->enter();
    for (size_t i = 0; i < j->num_shards; i++) {
        kt_back_shard *p = &j->shards[i];
        if (!kt_serves(me, i)) continue;
        const kt_back_worker w = {j, p, &p->workers[me->index - p->team->first]};
        take(&w, j->step->shared ? j->shards : p);
    }
    if (isa->leave) isa->leave();
}

int kt_back_run(kt_back_job *j, const kt_step *step) {
    j->step = step;
    for (kt_back_shard *p = j->shards; p < j->shards + j->num_shards; p++)
        atomic_store_explicit(&p->next, 0, memory_order_relaxed);
    return kt_pool_run(work, j, j->layer->placement);
}
