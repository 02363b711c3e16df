/* Between the parts of the forward pass: route.c fills a route, rows.c puts rows where kernels look for them, scratch.c has the
 * memory, phases.c computes, moe.c has them do it chunk by chunk. */
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
    int64_t *ids;          /* [tokens][top_k]: as they were then */
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

typedef float panel_row[KT_PANEL];
typedef uint16_t panel_h[KT_PANEL]; /* bf16 */

/* Items are handed out by a counter on a cache line of its own. */
typedef struct counter {
    _Alignas(64) _Atomic size_t next;
} counter;

typedef struct worker_scratch {
    panel_row *g, *u; /* [KT_M_BLOCK] each; phase B has d in them, of two panels */
    panel_row *slab;  /* [run_b][tokens] */
    panel_h *h;       /* [KT_M_BLOCK], before rows are encoded */
    uint16_t *row;    /* [k_hidden], likewise */
    void *kernel;
} worker_scratch;

/* One shard's share of a job. */
typedef struct part {
    const kt_shard *shard;
    size_t k_inter, inter_panels; /* padded sizes */
    size_t threads;               /* of its team */
    size_t run_b;                 /* panels of y that one worker does together, at most */
    size_t h_stride_bytes;
    const void **h_rows;       /* [slots] */
    _Atomic uint32_t *arrived; /* [hidden_panels]: groups whose d is there */
    worker_scratch *workers;   /* [threads] */
    /* In memory that its own threads touch first, as what the workers have is: */
    uint8_t *h;      /* [slots] rows */
    float *d;        /* [slots][hidden_panels * KT_PANEL] */
    panel_row *sums; /* [hidden_panels][tokens]; none where it is the only shard */
    counter a, b;
} part;

typedef struct job {
    const kt_layer *layer;
    kt_batch batch;
    route route;
    size_t k_hidden, hidden_panels; /* padded sizes */
    bool reduce;
    x_source source;
    x_kind x[KT_X_KINDS];
    size_t x_kinds;
    uint8_t *together;        /* [slots]: see x_source */
    _Atomic uint32_t *summed; /* [hidden_panels]: shards whose sums are there */
    size_t shards;
    part parts[KT_SHARDS_MAX];
} job;

/* Of items that one worker takes: the longest run, and how many each worker may still expect. */
enum { LONGEST_RUN = 8, RUNS_LEFT = 4 };

size_t kt_scratch_need(job *j, size_t tokens); /* bytes, for a chunk of so many */
bool kt_scratch_have(job *j, size_t tokens);   /* gives all arrays of a job their places; false where memory is refused */
void kt_phases(void *job, size_t worker, size_t workers); /* a kt_task */

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
