/* Dealing a list: rounds are cut into runs when the list is made, and a worker finds its next run by one counter.
 *
 * A worker's first run is its own without any counter. The next ones are those of its group, whose counter is on a cache line that
 * only neighbours share; then those that other groups have left. */
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

/* The items of a group's run; false: the group has no more. */
static bool run_of(const kt_list *l, const kt_group *g, size_t run, size_t *first, size_t *end) {
    const size_t number = run / g->size;
    if (number >= l->num_rounds) return false;
    const kt_round *round = &l->rounds[number];
    const size_t place = (g->first - team_of(l)->first + run % g->size + l->turned) % team_of(l)->size;
    const uint64_t from = round->first + place * round->each, to = from + round->each;
    *first = item_at(l, from < round[1].first ? from : round[1].first);
    *end = item_at(l, to < round[1].first ? to : round[1].first);
    return true;
}

kt_hand kt_hand_of(const kt_list *l, const kt_worker *me) {
    const kt_team *team = team_of(l);
    const bool own = me->group >= team->first_group && me->group < team->first_group + team->num_groups;
    return (kt_hand){.group = own ? me->group : team->first_group};
}

bool kt_list_take(const kt_list *l, const kt_worker *me, kt_hand *hand, size_t *first, size_t *end) {
    const kt_team *team = team_of(l);
    while (hand->others < team->num_groups) {
        const kt_group *g = group_of(l, hand->group);
        _Atomic size_t *next = &l->queues[hand->group - team->first_group].next;
        bool more = true;
        while (more) {
            const bool own = !hand->began;
            hand->began = true;
            more = own || atomic_load_explicit(next, memory_order_relaxed) < l->num_rounds * g->size;
            if (!more) break;
            const size_t run = own ? me->index - g->first : atomic_fetch_add_explicit(next, 1, memory_order_relaxed);
            more = run_of(l, g, run, first, end);
            if (more && *first < *end) return true; /* a run of less than an item may have none */
        }
        hand->others++;
        if (++hand->group == team->first_group + team->num_groups) hand->group = team->first_group;
    }
    return false;
}

size_t kt_list_peek(const kt_list *l, const kt_worker *me, const kt_hand *hand) {
    const kt_team *team = team_of(l);
    const kt_group *g = group_of(l, hand->group);
    size_t first = kt_list_items(l), end;
    const _Atomic size_t *next = &l->queues[hand->group - team->first_group].next;
    if (hand->others < team->num_groups)
        run_of(l, g, hand->began ? atomic_load_explicit(next, memory_order_relaxed) : me->index - g->first, &first, &end);
    return first;
}
