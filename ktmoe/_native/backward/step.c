/* One step by the pool's workers: each takes the next item until there are none. */
#include "backward/step.h"

#include "base/pool.h"
#include "forward/tuning.h"

static void take(kt_items *items, size_t from, size_t shard, size_t place) {
    kt_shard_items *of = &items->of[from];
    for (size_t i; (i = atomic_fetch_add_explicit(&of->next, 1, memory_order_relaxed)) < of->count;) {
        items->item(items->job, shard, place, i);
        if (kt_moe_tuning.by_turns) kt_os_yield();
    }
}

static void work(void *context, const kt_worker *me) {
    kt_items *items = context;
    const kt_isa *isa = items->isa;
    if (isa->enter) isa->enter();
    for (size_t i = 0; i < kt_shards_of(items->placement); i++)
        if (kt_serves(me, i)) take(items, items->shared ? 0 : i, i, me->index - me->teams->of[i].first);
    if (isa->leave) isa->leave();
}

int kt_items_run(kt_items *items) {
    for (size_t i = 0; i < KT_SHARDS_MAX; i++) atomic_store_explicit(&items->of[i].next, 0, memory_order_relaxed);
    return kt_pool_run(work, items, items->placement);
}
