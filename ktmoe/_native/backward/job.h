/* A window of a batch while its gradients are computed: some of the slots, in their order, one after another. Sums go on from window to
 * window, so that no bit depends on where one ends.
 *
 * scratch.c has the memory, rows.c rows of x and of dY, transposed.c the products with frozen weights, added.c what adapters add.
 * inner.c is from y to gate and up, outer.c from there to x, adapters.c gradients of adapters: each in steps, which backward.c has run by
 * step.c, one after another, from window to window.
 */
#ifndef KT_BACKWARD_JOB_H
#define KT_BACKWARD_JOB_H

#include "backward/backward.h"
#include "backward/transposed.h"
#include "base/teams.h"
#include "layer/adapter.h"

enum { KT_TILE_COLUMNS = 512 }; /* of rows that are widened at once */

typedef struct kt_back_scratch {
    kt_product_scratch product;
    kt_panel_row *g, *u; /* [KT_ROWS_MAX] */
    kt_panel_h *dg, *du, *h;
    float *wide;   /* [KT_TILE_ROWS][KT_TILE_COLUMNS]: rows in fp32 */
    float *wide_t; /* [KT_TILE_ROWS][rank] */
    float *low;    /* [KT_TILE_COLUMNS][rank]: numbers of A or B */
    uint16_t *row; /* a row of dY, padded */
    float *sum;    /* [hidden] */
} kt_back_scratch;

/* What one shard's team does of a job. */
typedef struct kt_back_shard {
    const kt_shard *shard;
    const kt_team *team;
    size_t inter_panels;
    kt_product_rows dg, du; /* [slots], padded to whole panels */
    uint16_t *plain[2];     /* [slots][its columns]: dg and du, where gate's or up's adapter needs them */
    uint16_t *h;            /* likewise, where down's does */
    float *dr;              /* [inter_panels][slots] */
    float *dx;              /* [slots][hidden_panels * KT_PANEL] */
    kt_back_scratch *workers;
} kt_back_shard;

/* Rows of one expert, window's slots [first, first + rows), for one call of a kernel. */
typedef struct kt_back_strip {
    uint32_t piece, first, rows;
} kt_back_strip;

typedef struct kt_back_job kt_back_job;

/* What one worker has. */
typedef struct kt_back_worker {
    kt_back_job *job;
    kt_back_shard *shard;
    const kt_back_scratch *scratch;
} kt_back_worker;

/* Items that need nothing of one another, but all of the step before. */
typedef struct kt_step {
    size_t (*items)(const kt_back_job *j, const kt_back_shard *p);
    void (*item)(const kt_back_worker *w, size_t item);
    bool shared; /* any worker does any item, and they are counted for the first shard; else each shard's team its own */
} kt_step;

struct kt_back_job {
    const kt_layer *layer;
    kt_backward to; /* a chunk of tokens */
    kt_route route;
    size_t intermediate, k_hidden, hidden_panels;
    kt_products products;
    float *sums;      /* [tokens][hidden], where dX is bf16 and not all of it is of one window; or NULL */
    uint8_t *written; /* [num_experts]: gradients of its adapters are there */

    size_t first, slots; /* the window */
    bool last;           /* of the chunk */
    kt_piece *pieces;    /* of the window; first: in the window */
    size_t num_pieces;
    kt_back_strip *strips; /* most rows first */
    size_t num_strips;
    kt_kept kept;           /* by kt_kept_row() */
    bool again;             /* made for this window; else for the batch */
    int64_t *ids;           /* [tokens][top_k], for that: those of the window, else -1 */
    uint32_t *kept_rows;    /* likewise, their rows */
    kt_product_rows dy;     /* [slots] */
    float *dt[KT_MATRICES]; /* [slots][rank]: gradients of T, with the adapter's scale */
    float *dr_bias;         /* [slots] */

    const kt_step *step;
    size_t num_shards;
    kt_back_shard shards[KT_SHARDS_MAX];
};

/* The most tokens of a chunk, and slots of a window, that fit into the scratch memory. */
void kt_back_chunk(kt_back_job *j, size_t *tokens, size_t *slots);
/* Gives all arrays their places; false where memory is refused. */
bool kt_back_have(kt_back_job *j, size_t tokens, size_t slots);

extern const kt_step kt_step_enter, kt_step_inner, kt_step_lower, kt_step_outer, kt_step_sum, kt_step_adapters, kt_step_clear;

/* Where a strip's row is in what forward kept. */
static inline size_t kt_kept_row(const kt_back_job *j, size_t slot) {
    return j->again ? slot : j->route.slot_row[j->first + slot];
}
static inline const kt_adapter *kt_adapter_of(const kt_back_job *j, size_t matrix) {
    const kt_adapter *a = j->to.batch.adapter;
    return a && a->of[matrix].a.data ? a : NULL;
}

#endif
