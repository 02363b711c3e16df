/* Who computes what, and in which order: the items of a routed batch, and the runs of them that workers take. Nothing here computes
 * or waits, so that bench/simulation deals the same items to workers that it makes up.
 *
 * STRIP  rows of a piece. Where one expert has a large share of all rows, its piece is several strips.
 * ITEM   phase A: a strip and a panel of gate and up, or one panel of the two where pairs would leave workers idle ("halves").
 *        phase B, by strip: a strip and a panel of down; by panel: a range of tokens and a panel of y, whose worker adds up all
 *        experts.
 * ROUND  a share of a list's cost that is dealt in runs of equal cost, one for each worker of the team. Rounds get smaller, so that
 *        all workers end together.
 */
#ifndef KT_SCHEDULE_H
#define KT_SCHEDULE_H

#include <stdatomic.h>

#include "base/teams.h"
#include "forward/route.h"

/* A run is one in KT_RUNS_LEFT of a worker's share of what is left of a list. */
enum { KT_RUNS_LEFT = 4, KT_ROUNDS_MAX = 64 };

typedef enum kt_phase { KT_PHASE_A, KT_PHASE_B, KT_PHASES } kt_phase;

typedef struct kt_strip {
    uint32_t piece, first, rows; /* slots [first, first + rows) */
} kt_strip;

typedef struct kt_round {
    uint64_t first, each; /* costs: of all items before, and of a run */
} kt_round;

/* A group's runs: those of its workers in all rounds. */
typedef struct kt_queue {
    _Alignas(64) _Atomic size_t next;
} kt_queue;

/* The items of a phase in one shard. Item i is number i % per_strip of strip i / per_strip. Where phase B is by panel, its strips are
 * the ranges of tokens. */
typedef struct kt_list {
    const kt_teams *teams;
    size_t shard, num_strips, per_strip;
    const uint64_t *cost;      /* [num_strips + 1]: of one item of each strip before */
    size_t num_rounds, turned; /* turned: the place in a round of the team's first worker; 0, but for tests */
    kt_round *rounds;          /* [KT_ROUNDS_MAX + 1]: num_rounds, and where the list ends */
    kt_queue *queues;          /* [its team's groups] */
} kt_list;

typedef struct kt_shard_lists {
    size_t inter_panels;
    size_t slab_panels; /* panels of y that one worker adds up together, at most */
    bool halves;
    kt_list of[KT_PHASES];
} kt_shard_lists;

typedef struct kt_schedule {
    const kt_teams *teams;
    bool by_panel, may_halve;
    size_t hidden_panels;
    size_t num_strips;
    kt_strip *strips;     /* most rows first; those of a piece one after another */
    uint64_t *strip_cost; /* [num_strips + 1], before each */
    uint64_t *range_cost; /* [num_ranges + 1], likewise, where phase B is by panel */
    kt_shard_lists shards[KT_SHARDS_MAX];
} kt_schedule;

/* Where a worker is in a list. */
typedef struct kt_hand {
    size_t group;  /* its own, counted in the team */
    size_t others; /* groups that it found without runs: they follow one another from its own on */
} kt_hand;

/* Items [first, end). */
typedef struct kt_run {
    size_t first, end;
} kt_run;

/* How phase B is done, and into how many ranges of tokens a chunk is cut: decided before it is routed. d_fits: whether d may be kept
 * for all slots. num_experts: of the layer. */
void kt_schedule_plan(kt_schedule *s, size_t tokens, size_t top_k, size_t num_experts, bool d_fits, size_t *ranges);
void kt_schedule_carve(kt_schedule *s, kt_carver *c, size_t pieces, size_t ranges, size_t slots); /* at most so many */
void kt_schedule_fill(kt_schedule *s, const kt_route *r);

void kt_list_carve(kt_list *list, kt_carver *c, size_t groups); /* groups: of its team */
/* Makes a list, whose rounds and queues have their places. */
void kt_list_fill(kt_list *list, const kt_teams *teams, size_t shard, const uint64_t *cost, size_t num_strips,
                  size_t per_strip);
/* The most rows of a strip, if `pieces` have so many rows and as many panels to compute: items shall be few of a worker's share. */
size_t kt_strip_rows(const kt_teams *teams, size_t pieces, size_t rows, size_t panels);
uint64_t kt_strip_cost(size_t rows); /* of one item */

kt_hand kt_hand_of(const kt_list *list, const kt_worker *me); /* me: of the list's team */
kt_run kt_list_take(const kt_list *list, kt_hand *hand);      /* the next run of a worker; without items: there is none */
/* Rounds of which the worker's group has runs left, or the group that it would take from. In the last one nobody takes two runs,
 * since others would have none. */
size_t kt_list_rounds_left(const kt_list *list, const kt_hand *hand);
/* Items of a run that ends at `end` that are computed together, from `item` on. */
size_t kt_items_together(const kt_schedule *s, size_t shard, kt_phase phase, size_t item, size_t end);
static inline size_t kt_list_items(const kt_list *list) { return list->num_strips * list->per_strip; }

#endif
