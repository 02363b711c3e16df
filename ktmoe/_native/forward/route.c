/* Routing: from ids by token to rows by expert, by counting sort. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "forward/route.h"

void kt_route_carve(kt_route *r, kt_carver *c, size_t num_experts, size_t tokens, size_t top_k) {
    r->used = kt_carve(c, num_experts, sizeof *r->used);
    r->by_cost = kt_carve(c, num_experts, sizeof *r->by_cost);
    r->slot_token = kt_carve(c, tokens * top_k, sizeof *r->slot_token);
    r->slot_weight = kt_carve(c, tokens * top_k, sizeof *r->slot_weight);
    r->token_slots = kt_carve(c, tokens * top_k, sizeof *r->token_slots);
    r->token_count = kt_carve(c, tokens, sizeof *r->token_count);
    r->active = kt_carve(c, num_experts, 1);
    r->ids = kt_carve(c, tokens * top_k, sizeof *r->ids);
}

static bool selected(const kt_route *r, int64_t id, size_t num_experts) {
    return id >= 0 && (uint64_t)id < num_experts && r->active[id];
}

static int more_rows_first(const void *a, const void *b, void *context) {
    const kt_expert_rows *used = context, *x = &used[*(const uint32_t *)a], *y = &used[*(const uint32_t *)b];
    if (x->count != y->count) return x->count < y->count ? 1 : -1;
    return x->expert < y->expert ? -1 : 1;
}

void kt_route_fill(kt_route *r, const kt_batch *b, size_t num_experts) {
    memcpy(r->ids, b->ids, b->tokens * b->top_k * sizeof *r->ids); /* read twice below, while their owner might change them */
    for (size_t e = 0; e < num_experts; e++) r->used[e] = (kt_expert_rows){.expert = e};
    for (size_t i = 0; i < b->tokens * b->top_k; i++)
        if (selected(r, r->ids[i], num_experts)) r->used[r->ids[i]].count++;

    size_t first = 0;
    for (size_t e = 0; e < num_experts; e++) {
        r->used[e].first = first;
        first += r->used[e].count;
        r->used[e].count = 0;
    }
    r->num_slots = first;
    for (size_t t = 0; t < b->tokens; t++)
        for (size_t s = 0; s < b->top_k; s++) {
            const int64_t id = r->ids[t * b->top_k + s];
            if (!selected(r, id, num_experts)) continue;
            kt_expert_rows *e = &r->used[id];
            const size_t slot = e->first + e->count++;
            r->slot_token[slot] = (uint32_t)t;
            r->slot_weight[slot] = b->weights[t * b->top_k + s];
        }

    r->num_used = 0;
    for (size_t e = 0; e < num_experts; e++)
        if (r->used[e].count) {
            r->by_cost[r->num_used] = (uint32_t)r->num_used;
            r->used[r->num_used++] = r->used[e];
        }
    qsort_r(r->by_cost, r->num_used, sizeof *r->by_cost, more_rows_first, r->used);

    memset(r->token_count, 0, b->tokens * sizeof *r->token_count);
    for (size_t slot = 0; slot < r->num_slots; slot++) {
        const size_t t = r->slot_token[slot];
        r->token_slots[t * b->top_k + r->token_count[t]++] = (uint32_t)slot;
    }
}
