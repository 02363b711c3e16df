/* Dealing a list: rounds are cut into runs when the list is made, and a worker finds its next run by one counter.
 *
 * It is that of the worker's group, on a cache line that only neighbours share; when the group has no more, that of another group.
 * No run is anybody's own: a thread that wakes up late, by a millisecond on some virtual machines, finds its share done. */
#include "forward/schedule.h"

static const kt_team *team_of(const kt_list *l) { return &l->teams->of[l->shard]; }
static const kt_group *group_of(const kt_list *l, size_t group) { return &l->teams->groups[group]; }

/* The first item that no less than `cost` is before. */
static size_t item_at(const kt_list *l, uint64_t cost) {
    size_t low = 0, high = l->num_strips; /* cost[low] <= cost / per_strip < cost[high] */
    if (cost >= l->cost[high] * l->per_strip) return kt_list_items(l);
    while (high - low > 1) {
        const size_t middle = (low + high) / 2;
        if (l->cost[middle] * l->per_strip <= cost)
            low = middle;
        else
            high = middle;
    }
    const uint64_t each = l->cost[low + 1] - l->cost[low];
    return low * l->per_strip + (cost - l->cost[low] * l->per_strip + each - 1) / each;
}

/* The items of a group's run, none if it has no more. */
static kt_run run_of(const kt_list *l, const kt_group *g, size_t number) {
    if (number / g->size >= l->num_rounds) return (kt_run){0};
    const kt_round *round = &l->rounds[number / g->size];
    const size_t place = (g->first - team_of(l)->first + number % g->size + l->turned) % team_of(l)->size;
    const uint64_t from = round->first + place * round->each, to = from + round->each, last = round[1].first;
    return (kt_run){item_at(l, from < last ? from : last), item_at(l, to < last ? to : last)};
}

kt_hand kt_hand_of(const kt_list *l, const kt_worker *me) { return (kt_hand){.group = me->group - team_of(l)->first_group}; }

kt_run kt_list_take(const kt_list *l, kt_hand *hand) {
    const kt_team *team = team_of(l);
    for (; hand->others < team->num_groups; hand->others++) {
        const size_t number = (hand->group + hand->others) % team->num_groups;
        const kt_group *g = group_of(l, team->first_group + number);
        _Atomic size_t *next = &l->queues[number].next;
        while (atomic_load_explicit(next, memory_order_relaxed) < l->num_rounds * g->size) {
            const kt_run run = run_of(l, g, atomic_fetch_add_explicit(next, 1, memory_order_relaxed));
            if (run.first < run.end) return run; /* one of less than an item may have none */
        }
    }
    return (kt_run){0};
}

size_t kt_list_rounds_left(const kt_list *l, const kt_hand *hand) {
    const kt_team *team = team_of(l);
    for (size_t others = hand->others; others < team->num_groups; others++) {
        const size_t number = (hand->group + others) % team->num_groups;
        const size_t begun = atomic_load_explicit(&l->queues[number].next, memory_order_relaxed);
        const size_t rounds = begun / group_of(l, team->first_group + number)->size;
        if (rounds < l->num_rounds) return l->num_rounds - rounds;
    }
    return 0;
}
