/* One dispatch of the pool for independent items, each of which one worker does. */
#ifndef KT_STEP_H
#define KT_STEP_H

#include <stdatomic.h>

#include "base/placement.h"
#include "ktmoe.h"

/* What one shard's team has to do. */
typedef struct kt_shard_items {
    size_t count;
    _Alignas(64) _Atomic size_t next;
} kt_shard_items;

typedef struct kt_items {
    const kt_isa *isa;
    const kt_placement *placement;
    void *job;
    /* An item, done by the worker at this place of a shard's team. */
    void (*item)(void *job, size_t shard, size_t place, size_t number);
    bool
        shared; /* any worker does any item, for its own shard, and they are counted for the first one; else each team its own */
    kt_shard_items of[KT_SHARDS_MAX];
} kt_items;

int kt_items_run(kt_items *items); /* 0 or an errno */

#endif
