/* Between the parts of the forward pass: route.c fills a route, rows.c puts rows where kernels look for them, moe.c holds the
 * memory and runs the phases. */
#ifndef KTMOE_MOE_H
#define KTMOE_MOE_H

#include <string.h>

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

/* x and where it goes. */
typedef struct x_source {
    const kt_layer *layer;
    const kt_batch *batch;
    const route *route;
    const uint8_t *together; /* [slots]: rows of the tile that the slot's row is in, where there are tiles */
    size_t k;                /* hidden, padded */
} x_source;

/* x as kernels of gate and up take it. */
typedef struct x_kind {
    const kt_rows *rows;
    bool stage;   /* rows are copied; else those of the caller's x are used where they are */
    bool by_slot; /* one a slot, else one a token */
    size_t stride_bytes;
    uint8_t *staged;
    const void **x; /* [slots] rows */
} x_kind;

size_t kt_row_bytes(size_t group_bytes, size_t k); /* from row to row */
/* Where row i of a group is, or its first piece, in an array of rows by slot. */
uint8_t *kt_row_of(const kt_rows *rows, uint8_t *base, size_t stride_bytes, const group *g, size_t i);
/* Inputs [first, first + count) of a row, bf16, to where a kernel looks for them. together: the rows of its tile. */
void kt_row_put(const kt_rows *rows, const uint16_t *x, size_t first, size_t count, size_t k, size_t together, void *row);
void kt_x_point(const x_source *s, x_kind *x); /* fills x->stage and x->x */
/* Part `worker` of `workers` of the copying. row: [k], the worker's own. */
void kt_x_stage(const x_source *s, const x_kind *x, size_t worker, size_t workers, uint16_t *row);

static inline float kt_bf16_to_f32(uint16_t b) {
    const uint32_t bits = (uint32_t)b << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint16_t kt_bf16_from_f32(float v) {
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
    return (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? quiet : rounded);
}

#endif
