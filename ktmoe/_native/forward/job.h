/* A chunk of a batch while it is computed: scratch.c has the memory, phases.c computes, moe.c goes from chunk to chunk. */
#ifndef KT_JOB_H
#define KT_JOB_H

#include "base/gate.h"
#include "base/teams.h"
#include "forward/rows.h"

typedef float kt_panel_row[KT_PANEL];
typedef uint16_t kt_panel_h[KT_PANEL]; /* bf16 */

/* Items are handed out by a counter on a cache line of its own. */
typedef struct kt_counter {
    _Alignas(64) _Atomic size_t next;
} kt_counter;

typedef struct kt_worker_scratch {
    kt_panel_row *g, *u; /* [KT_ROWS_MAX] each; phase B has d in them, of two panels */
    kt_panel_row *slab;  /* [slab_panels][tokens] */
    kt_panel_h *h;       /* [KT_ROWS_MAX], before rows are encoded */
    uint16_t *row;       /* [k_hidden], likewise */
    void *kernel;
} kt_worker_scratch;

/* What one shard's team does of a job. */
typedef struct kt_shard_job {
    const kt_shard *shard;
    size_t k_inter, inter_panels; /* padded sizes */
    kt_team team;
    size_t slab_panels; /* panels of y that one worker adds up together, at most */
    size_t h_stride_bytes;
    const void **h_rows;        /* [slots] */
    _Atomic uint32_t *arrived;  /* [hidden_panels]: experts whose d is there */
    kt_worker_scratch *workers; /* [team.size] */
    /* In memory that its own threads touch first, as what the workers have is: */
    uint8_t *h;         /* [slots] rows */
    float *d;           /* [slots][hidden_panels * KT_PANEL] */
    kt_panel_row *sums; /* [hidden_panels][tokens]; none where it is the only shard */
    kt_counter a, b;
    kt_gate h_there; /* passed by all workers of the team */
} kt_shard_job;

typedef struct kt_job {
    const kt_layer *layer;
    kt_batch batch;
    kt_route route;
    size_t k_hidden, hidden_panels; /* padded sizes */
    bool reduce;                    /* phase B's items are (expert, panel) */
    kt_x x;
    kt_x_form forms[KT_X_FORMS];
    size_t num_forms;
    uint8_t *together;        /* [slots]: see kt_x */
    _Atomic uint32_t *summed; /* [hidden_panels]: shards whose sums are there */
    size_t num_shards;
    kt_shard_job shards[KT_SHARDS_MAX];
} kt_job;

/* How many runs of items each worker may still expect, and the panels of y that one worker adds up together, at most. */
enum { RUNS_LEFT = 4, SLAB_PANELS = 8 };

size_t kt_scratch_need(kt_job *j, size_t tokens); /* bytes, for a chunk of so many */
bool kt_scratch_have(kt_job *j, size_t tokens);   /* gives all arrays of a job their places; false where memory is refused */
void kt_phases(void *job, const kt_worker *me);   /* a kt_task */

#endif
