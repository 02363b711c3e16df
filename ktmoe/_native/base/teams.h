/* Which threads serve which shard. The threads of a shard are its team. The threads of a team that share an L3 cache are cut
 * into groups. A group has one door into the pool's tasks, and one queue of work. */
#ifndef KT_TEAMS_H
#define KT_TEAMS_H

#include "base/placement.h"

enum { KT_GROUP_MAX = 8 };

/* Workers [first, first + size). */
typedef struct kt_group {
    size_t shard, first, size;
    const kt_cpus *cpus; /* of their domain; one of each core, as long as no more threads are there */
} kt_group;

/* Workers [first, first + size) and their groups. Where there are fewer threads than shards, a worker is the team of several. */
typedef struct kt_team {
    size_t first, size;
    size_t first_group, num_groups;
} kt_team;

typedef struct kt_teams {
    size_t workers, shards, num_groups;
    kt_team of[KT_SHARDS_MAX];
    kt_group *groups;
} kt_teams;

typedef struct kt_worker {
    size_t index; /* 0: the caller */
    size_t group;
    const kt_teams *teams;
} kt_worker;

/* Deals threads to shards, and those of a shard to its domains, in proportion to the physical cores. Returns 0 or ENOMEM. The
 * teams point into the placement. */
int kt_teams_make(kt_teams *teams, const kt_placement *placement, size_t threads);
void kt_teams_free(kt_teams *teams);

static inline bool kt_serves(const kt_worker *me, size_t shard) {
    const kt_team *team = &me->teams->of[shard];
    return team->first <= me->index && me->index < team->first + team->size;
}

#endif
