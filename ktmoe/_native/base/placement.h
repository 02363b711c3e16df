/* Where the shards of a layer are, and which threads are whose. A shard is what one NUMA node has of a layer. */
#ifndef KT_PLACEMENT_H
#define KT_PLACEMENT_H

#include "base/os.h"

/* Pointers tell placements apart: one that a run has seen stays as it is for good. NULL: one shard, threads anywhere. */
enum { KT_SHARDS_MAX = 32 };
typedef struct kt_placement {
    size_t shards;
    size_t threads;  /* unless the user chose a number */
    size_t num_cpus; /* of all shards */
    kt_cpus *cpus;   /* [shards]: where each one's threads run */
} kt_placement;
static inline size_t kt_shards_of(const kt_placement *placement) { return placement ? placement->shards : 1; }

/* The threads of a shard, and a worker's place among them. Workers are dealt to the shards in turn; where there are fewer, one
 * serves several shards, one after another. */
typedef struct kt_team {
    size_t shard, rank, size;
} kt_team;
static inline kt_team kt_team_of(size_t shard, size_t worker, size_t workers, size_t shards) {
    return (kt_team){shard, worker / shards, workers > shard ? (workers - shard - 1) / shards + 1 : 1};
}

#endif
