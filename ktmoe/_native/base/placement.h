/* Where the shards of a layer are. A shard is what one NUMA node has of a layer. */
#ifndef KT_PLACEMENT_H
#define KT_PLACEMENT_H

#include "base/os.h"

enum { KT_SHARDS_MAX = 32 };

/* The CPUs of a shard's node that share an L3 cache. */
typedef struct kt_domain {
    size_t shard;
    size_t cores;       /* physical ones, 1 at least */
    kt_cpus cpus;       /* all that we may use */
    kt_cpus one_a_core; /* of each core one: its hyperthreads stay idle */
} kt_domain;

/* Pointers tell placements apart: one that a run has seen stays as it is for good. NULL: one shard, on all CPUs of the process. */
typedef struct kt_placement {
    size_t shards;
    size_t threads;  /* unless the user chose a number */
    size_t num_cpus; /* of all shards */
    size_t num_domains;
    kt_domain *domains;       /* shard by shard, each of which has one at least */
    int nodes[KT_SHARDS_MAX]; /* whose memory each shard's is; below 0: whoever touches it first decides */
} kt_placement;
static inline size_t kt_shards_of(const kt_placement *placement) { return placement ? placement->shards : 1; }
static inline int kt_node_of(const kt_placement *placement, size_t shard) { return placement ? placement->nodes[shard] : -1; }

#endif
