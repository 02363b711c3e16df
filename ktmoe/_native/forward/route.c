/* Routing: from ids by token to rows by expert, by counting sort. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "forward/route.h"

void kt_route_carve(kt_route *r, kt_carver *c, size_t num_experts, size_t tokens, size_t top_k, size_t ranges) {
    r->ranges = kt_carve(c, ranges, sizeof *r->ranges);
    r->pieces = kt_carve(c, num_experts * ranges, sizeof *r->pieces);
    r->by_cost = kt_carve(c, num_experts * ranges, sizeof *r->by_cost);
    r->slot_token = kt_carve(c, tokens * top_k, sizeof *r->slot_token);
    r->slot_weight = kt_carve(c, tokens * top_k, sizeof *r->slot_weight);
    r->slot_row = kt_carve(c, tokens * top_k, sizeof *r->slot_row);
    r->token_slots = kt_carve(c, tokens * top_k, sizeof *r->token_slots);
    r->token_count = kt_carve(c, tokens, sizeof *r->token_count);
    r->active = kt_carve(c, num_experts, 1);
    r->ids = kt_carve(c, tokens * top_k, sizeof *r->ids);
}

static bool selected(const kt_route *r, int64_t id, size_t num_experts) {
    return id >= 0 && (uint64_t)id < num_experts && r->active[id];
}

static int more_rows_first(const void *a, const void *b, void *context) {
    const kt_piece *pieces = context, *x = &pieces[*(const uint32_t *)a], *y = &pieces[*(const uint32_t *)b];
    if (x->count != y->count) return x->count < y->count ? 1 : -1;
    if (x->expert != y->expert) return x->expert < y->expert ? -1 : 1;
    return x->first < y->first ? -1 : 1;
}

/* The pieces of a range, whose slots follow those of the ranges before. */
static void fill_range(kt_route *r, const kt_batch *b, size_t num_experts, kt_route_range *range) {
    kt_piece *const all = r->pieces + r->num_pieces; /* by id, at first */
    range->first_piece = r->num_pieces;
    for (size_t e = 0; e < num_experts; e++) all[e] = (kt_piece){.expert = e};
    for (size_t i = range->first * b->top_k; i < range->end * b->top_k; i++)
        if (selected(r, r->ids[i], num_experts)) all[r->ids[i]].count++;

    size_t first = r->num_slots;
    for (size_t e = 0; e < num_experts; e++) {
        all[e].first = first;
        first += all[e].count;
        all[e].count = 0;
    }
    range->num_slots = first - r->num_slots;
    r->num_slots = first;
    for (size_t t = range->first; t < range->end; t++)
        for (size_t s = 0; s < b->top_k; s++) {
            const int64_t id = r->ids[t * b->top_k + s];
            if (!selected(r, id, num_experts)) continue;
            kt_piece *e = &all[id];
            const size_t slot = e->first + e->count++;
            r->slot_token[slot] = (uint32_t)t;
            r->slot_weight[slot] = b->weights[t * b->top_k + s];
            r->slot_row[slot] = b->rows ? b->rows[t * b->top_k + s] : (uint32_t)(t * b->top_k + s);
        }

    for (size_t e = 0; e < num_experts; e++)
        if (all[e].count) {
            r->by_cost[r->num_pieces] = (uint32_t)r->num_pieces;
            r->pieces[r->num_pieces++] = all[e];
        }
    range->num_pieces = r->num_pieces - range->first_piece;
}

void kt_route_fill(kt_route *r, const kt_batch *b, size_t num_experts, size_t ranges) {
    memcpy(r->ids, b->ids, b->tokens * b->top_k * sizeof *r->ids); /* read twice, while their owner might change them */
    if (ranges > b->tokens) ranges = b->tokens;                    /* the last chunk is shorter */
    r->num_ranges = ranges;
    r->num_pieces = r->num_slots = 0;
    for (size_t i = 0; i < ranges; i++) {
        r->ranges[i] = (kt_route_range){.first = b->tokens * i / ranges, .end = b->tokens * (i + 1) / ranges};
        fill_range(r, b, num_experts, &r->ranges[i]);
    }
    qsort_r(r->by_cost, r->num_pieces, sizeof *r->by_cost, more_rows_first, r->pieces);

    memset(r->token_count, 0, b->tokens * sizeof *r->token_count);
    for (size_t slot = 0; slot < r->num_slots; slot++) {
        const size_t t = r->slot_token[slot];
        r->token_slots[t * b->top_k + r->token_count[t]++] = (uint32_t)slot;
    }
}
