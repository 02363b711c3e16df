/* Between the parts of the forward pass: route.c fills a route, moe.c holds the memory and runs the phases. */
#ifndef KTMOE_MOE_H
#define KTMOE_MOE_H

#include "driver.h"

/* Carves 64-byte aligned pieces from base; with base NULL it only adds up. */
typedef struct carver {
    uint8_t *base;
    size_t used;
} carver;
void *kt_carve(carver *c, size_t count, size_t size);

/* The slots of one expert: rows [first, first + count) of everything that is kept by slot. */
typedef struct group {
    size_t expert, first, count;
} group;

/* Which expert sees which tokens. A slot is one (token, expert) pair that is not skipped; slots are sorted by expert, then
 * token, then their place in the token's list. */
typedef struct route {
    size_t num_groups, num_slots;
    group *groups;         /* ascending expert */
    uint32_t *by_cost;     /* indices of groups, most rows first */
    uint32_t *slot_token;  /* [slots] */
    float *slot_weight;    /* [slots] */
    uint32_t *token_slots; /* [tokens][top_k]: a token's slots, ascending, so in ascending expert */
    uint32_t *token_count; /* [tokens] */
    uint8_t *active;       /* [num_experts]: the mask as it was when the call began, set by the caller */
} route;
void kt_route_carve(route *r, carver *c, size_t num_experts, size_t tokens, size_t top_k);
void kt_route_fill(route *r, const kt_batch *batch, size_t num_experts);

#endif
