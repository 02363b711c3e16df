/* Makes the lists: strips in order of their rows, their costs, and rounds of runs for every shard's team. */
#include <string.h>

#include "forward/schedule.h"
#include "forward/tuning.h"

enum {
    PANEL_ROWS = 8,  /* what reading and decoding a panel costs, in rows that are multiplied with it */
    D_SHARE = 8,     /* writing and adding up a row of d costs one in so many of multiplying it */
    SPLIT_ROWS = 64, /* strips of fewer rows would decode too often. Whole tiles */
    RANGES_MAX = 8,
    HALVES_RUNS = 4, /* with so many pairs for each worker, what one waits at the end is little */
    HALVES_SLOTS = 64,
    SLAB_PANELS = 8
};

static size_t divide_up(size_t a, size_t b) { return (a + b - 1) / b; }

static size_t largest_team(const kt_teams *t) {
    size_t most = 1;
    for (size_t i = 0; i < t->shards; i++) most = t->of[i].size > most ? t->of[i].size : most;
    return most;
}

/* The cost of phase B for the last worker to end, in rows of one panel, if panels of y are its items. */
static size_t cost_by_panel(size_t panels, size_t workers, size_t used, size_t slots, size_t ranges) {
    const size_t item = used * PANEL_ROWS + slots / ranges;
    return divide_up(panels * ranges, workers) * item + item / 16; /* workers are not equally fast */
}

/* The same cost, if strips and panels are its items. */
static size_t cost_by_strip(size_t panels, size_t workers, size_t used, size_t slots) {
    return panels * (used * PANEL_ROWS + slots + slots / D_SHARE) / workers + PANEL_ROWS + slots / used;
}

static void plan_b(kt_schedule *s, size_t tokens, size_t top_k, size_t num_experts, bool d_fits, size_t *ranges) {
    const size_t slots = tokens * top_k, used = slots < num_experts ? slots : num_experts, workers = largest_team(s->teams);
    *ranges = 1;
    s->by_panel = slots > kt_moe_tuning.reduce_slots;
    s->may_halve = !s->by_panel && slots <= HALVES_SLOTS;
    if (!s->by_panel) return;
    size_t least = cost_by_panel(s->hidden_panels, workers, used, slots, 1);
    for (size_t r = 2; r <= RANGES_MAX && r <= tokens; r++) {
        const size_t cost = cost_by_panel(s->hidden_panels, workers, used, slots, r);
        if (cost < least) least = cost, *ranges = r;
    }
    if (kt_moe_tuning.reduce_slots && d_fits && cost_by_strip(s->hidden_panels, workers, used, slots) < least) {
        s->by_panel = false;
        *ranges = 1;
    }
    if (kt_moe_tuning.ranges && s->by_panel) *ranges = kt_moe_tuning.ranges < tokens ? kt_moe_tuning.ranges : tokens;
}

void kt_schedule_plan(kt_schedule *s, size_t tokens, size_t top_k, size_t num_experts, bool d_fits, size_t *ranges) {
    plan_b(s, tokens, top_k, num_experts, d_fits, ranges);
    for (size_t i = 0; i < s->teams->shards; i++) {
        const size_t first_run = s->hidden_panels * *ranges / (KT_RUNS_LEFT * s->teams->of[i].size);
        s->shards[i].slab_panels = first_run < 1 ? 1 : first_run > SLAB_PANELS ? SLAB_PANELS : first_run;
    }
}

void kt_schedule_carve(kt_schedule *s, kt_carver *c, size_t pieces, size_t ranges, size_t slots) {
    const size_t most = pieces + slots / SPLIT_ROWS;
    s->strips = kt_carve(c, most, sizeof *s->strips);
    s->strip_cost = kt_carve(c, most + 1, sizeof *s->strip_cost);
    s->range_cost = kt_carve(c, ranges + 1, sizeof *s->range_cost);
    for (size_t i = 0; i < s->teams->shards; i++)
        for (kt_list *l = s->shards[i].of; l < s->shards[i].of + KT_PHASES; l++)
            kt_list_carve(l, c, s->teams->of[i].num_groups);
}

void kt_list_carve(kt_list *l, kt_carver *c, size_t groups) {
    l->rounds = kt_carve(c, KT_ROUNDS_MAX + 1, sizeof *l->rounds);
    l->queues = kt_carve(c, groups, sizeof *l->queues);
}

uint64_t kt_strip_cost(size_t rows) { return PANEL_ROWS + rows; }

size_t kt_strip_rows(const kt_teams *teams, size_t pieces, size_t rows, size_t panels) {
    const size_t workers = largest_team(teams);
    if (workers == 1) return rows;
    const size_t most = (pieces * PANEL_ROWS + rows) * panels / (KT_RUNS_LEFT * workers);
    return most < SPLIT_ROWS ? SPLIT_ROWS : most;
}

/* In every list that has strips. */
static size_t longest_strip(const kt_schedule *s, const kt_route *r) {
    size_t panels = s->by_panel ? SIZE_MAX : s->hidden_panels;
    for (size_t i = 0; i < s->teams->shards; i++)
        panels = s->shards[i].inter_panels < panels ? s->shards[i].inter_panels : panels;
    return kt_strip_rows(s->teams, r->num_pieces, r->num_slots, panels);
}

static void cut_strips(kt_schedule *s, const kt_route *r) {
    const size_t longest = longest_strip(s, r);
    s->num_strips = 0;
    s->strip_cost[0] = 0;
    for (size_t i = 0; i < r->num_pieces; i++) {
        const kt_piece *piece = &r->pieces[r->by_cost[i]];
        const size_t each = kt_round_up(divide_up(piece->count, divide_up(piece->count, longest)), KT_TILE_ROWS);
        for (size_t row = 0; row < piece->count; row += each) {
            const size_t rows = piece->count - row < each ? piece->count - row : each;
            s->strips[s->num_strips] = (kt_strip){r->by_cost[i], (uint32_t)(piece->first + row), (uint32_t)rows};
            s->strip_cost[s->num_strips + 1] = s->strip_cost[s->num_strips] + kt_strip_cost(rows);
            s->num_strips++;
        }
    }
}

/* Uneven rounds for tests: any number of runs, dealt to any worker first. */
static uint64_t uneven(uint64_t each, size_t round) {
    const uint64_t random = (round + 1) * kt_moe_tuning.uneven * 0x9E3779B97F4A7C15u >> 60;
    return 1 + each * random / 4;
}

static void cut_rounds(kt_list *l) {
    const size_t workers = l->teams->of[l->shard].size;
    const uint64_t all = l->cost[l->num_strips] * l->per_strip;
    uint64_t at = 0;
    l->turned = kt_moe_tuning.uneven % workers;
    l->num_rounds = 0;
    for (size_t strip = 0; at < all; l->num_rounds++) {
        while (l->cost[strip + 1] * l->per_strip <= at) strip++;
        const uint64_t item = l->cost[strip + 1] - l->cost[strip], left = all - at;
        uint64_t each = left / (KT_RUNS_LEFT * workers);
        if (each < item) each = item;
        if (kt_moe_tuning.uneven) each = uneven(each, l->num_rounds);
        if (l->num_rounds == KT_ROUNDS_MAX - 1) each = left / workers + 1;
        l->rounds[l->num_rounds] = (kt_round){at, each};
        at = each * workers < left ? at + each * workers : all;
    }
    l->rounds[l->num_rounds] = (kt_round){all, 0};
    for (size_t g = 0; g < l->teams->of[l->shard].num_groups; g++) l->queues[g].next = 0;
}

void kt_list_fill(kt_list *l, const kt_teams *teams, size_t shard, const uint64_t *cost, size_t num_strips, size_t per_strip) {
    l->teams = teams;
    l->shard = shard;
    l->cost = cost;
    l->num_strips = num_strips;
    l->per_strip = per_strip;
    cut_rounds(l);
}

/* Whether most of a team would only watch the last pairs. */
static bool halves_pay(const kt_schedule *s, size_t shard) {
    const size_t workers = s->teams->of[shard].size, pairs = s->num_strips * s->shards[shard].inter_panels;
    if (kt_moe_tuning.halves) return kt_moe_tuning.halves > 1;
    return pairs < HALVES_RUNS * workers && divide_up(2 * pairs, workers) < 2 * divide_up(pairs, workers);
}

void kt_schedule_fill(kt_schedule *s, const kt_route *r) {
    cut_strips(s, r);
    s->range_cost[0] = 0;
    for (size_t i = 0; i < r->num_ranges; i++) {
        const kt_route_range *range = &r->ranges[i];
        s->range_cost[i + 1] = s->range_cost[i] + 1 + range->num_pieces * PANEL_ROWS + range->num_slots;
    }
    for (size_t i = 0; i < s->teams->shards; i++) {
        kt_shard_lists *p = &s->shards[i];
        p->halves = s->may_halve && halves_pay(s, i);
        for (size_t phase = 0; phase < KT_PHASES; phase++) {
            const bool ranges = phase == KT_PHASE_B && s->by_panel;
            kt_list_fill(&p->of[phase], s->teams, i, ranges ? s->range_cost : s->strip_cost,
                         ranges ? r->num_ranges : s->num_strips,
                         phase == KT_PHASE_B ? s->hidden_panels : p->inter_panels << p->halves);
        }
    }
}

size_t kt_items_together(const kt_schedule *s, size_t shard, kt_phase phase, size_t item, size_t end) {
    const kt_shard_lists *p = &s->shards[shard];
    const size_t at = item % p->of[phase].per_strip, in_strip = p->of[phase].per_strip - at;
    size_t most = s->by_panel ? p->slab_panels : 2; /* two streams of weights are read faster than one */
    if (phase == KT_PHASE_A) most = p->halves && at % 2 == 0 ? 2 : 1;
    if (most > in_strip) most = in_strip;
    return end - item < most ? end - item : most;
}
