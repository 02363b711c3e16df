/* Memory that a pass needs while it computes, kept between calls: one arena of what all threads use, and one of each shard, in its
 * node's memory. With the pool's lock held. */
#ifndef KT_ARENAS_H
#define KT_ARENAS_H

#include "base/placement.h"

typedef struct kt_arena {
    uint8_t *base;
    size_t bytes;
} kt_arena;

typedef struct kt_arenas {
    kt_arena common, of[KT_SHARDS_MAX];
    const kt_placement *placement; /* that of[] is on */
} kt_arenas;

/* What a call needs: bytes of the common arena and of each shard's; more than `bound` is held only if that is needed. */
typedef struct kt_arena_sizes {
    const kt_placement *placement;
    size_t bound, common, of[KT_SHARDS_MAX];
} kt_arena_sizes;

size_t kt_arenas_bytes(const kt_arenas *a);
bool kt_arenas_have(kt_arenas *a, const kt_arena_sizes *sizes); /* false where memory is refused */
void kt_arenas_release(kt_arenas *a);

kt_arenas *kt_forward_arenas(void); /* those of all forward passes, of which one runs at a time */

#endif
