/* Settings that change speed and never a bit of the result. Tests force them. schedule.h has the words. */
#ifndef KT_TUNING_H
#define KT_TUNING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct kt_tuning {
    size_t scratch_bytes; /* bound of the scratch arenas; larger batches are processed in chunks */
    size_t reduce_slots;  /* up to so many slots phase B is by strip, beyond if an estimate says so; 0: always by panel */
    size_t ranges;        /* not 0: so many of tokens, where phase B is by panel */
    uint32_t halves;      /* 1: phase A's items never are single panels; 2: they are, where that is possible */
    uint32_t uneven;      /* not 0: runs of pseudo-random cost for any worker, seeded by this */
    bool only_many;       /* never few() */
    bool by_turns;        /* no worker begins before all are there, and each yields its CPU before it takes a run */
} kt_tuning;
extern kt_tuning kt_moe_tuning; /* read under the pool's lock */

#endif
