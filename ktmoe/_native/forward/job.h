/* A chunk of a batch while it is computed: scratch.c has the memory, runs.c goes from run to run, phase_a.c and phase_b.c compute,
 * phases.c is what a worker does, moe.c goes from chunk to chunk. */
#ifndef KT_JOB_H
#define KT_JOB_H

#include "forward/calls.h"
#include "forward/rows.h"
#include "forward/runs.h"
#include "forward/staging.h"

/* Inputs of A that are widened at once. */
enum { KT_LOWERED_INPUTS = 512 };

/* Strips whose T a phase needs: the next one, and how many are missing. */
typedef struct kt_lowered {
    kt_count next;
    kt_gate left;
} kt_lowered;

typedef struct kt_worker_scratch {
    kt_panel_row *g, *u; /* [KT_ROWS_MAX] each; phase B has d in them, of two panels */
    kt_panel_row *slab;  /* [slab_panels][tokens of a range]: sums of phase B by panel, where there is one shard */
    kt_panel_h *h;       /* [KT_ROWS_MAX], before rows are encoded */
    uint16_t *row;       /* [k_hidden], likewise */
    void *kernel;
    /* What an adapter needs: */
    kt_panel_row *added[2]; /* [KT_ROWS_MAX] each: to g and u, or to d of two panels */
    float *wide;            /* [KT_TILE_ROWS] rows of x or h */
    float *low;             /* numbers of A or B */
    kt_panel_row *kept[2];  /* [KT_ROWS_MAX] each: g and u, where they are kept */
} kt_worker_scratch;

/* What one shard's team does of a job. */
typedef struct kt_shard_job {
    const kt_shard *shard;
    const kt_team *team;
    const kt_shard_lists *lists;
    size_t k_inter, inter_panels; /* padded sizes */
    size_t h_stride_bytes;
    const void **h_rows;        /* [slots] */
    kt_gate *gates;             /* [pieces]: items of phase A that are still missing */
    _Atomic uint8_t *met;       /* [strips][inter_panels]: whether one of the two halves is there */
    kt_count *arrived;          /* [hidden_panels]: strips whose d is there */
    kt_worker_scratch *workers; /* [team's] */
    /* These are in memory that the shard's own threads alone touch, as what the workers have is: */
    uint8_t *h;           /* [slots] rows */
    kt_panel_row *halves; /* [2][inter_panels][slots]: g and u that wait for each other */
    kt_panel_row *d;      /* [slots][hidden_panels]; none where phase B is by panel */
    kt_panel_row *sums;   /* [hidden_panels][tokens]; none where it is the only shard */
    uint16_t *bf16_h;     /* [slots][its columns]: what down's adapter takes; none without one */
} kt_shard_job;

typedef struct kt_job {
    const kt_layer *layer;
    kt_batch batch;
    kt_route route;
    kt_schedule schedule;
    size_t intermediate;            /* of all shards */
    size_t k_hidden, hidden_panels; /* padded sizes */
    kt_x x;
    kt_x_form forms[KT_X_FORMS];
    size_t num_forms;
    kt_gate begun;      /* workers that are not there yet: tuning.by_turns waits for all */
    kt_staging staging; /* of x, in all forms, by the workers */
    uint16_t *row;      /* [k_hidden]: a row of x before it is encoded, where the caller stages it */
    uint8_t *together;  /* [slots]: see kt_x */
    kt_count *summed;   /* [ranges][hidden_panels]: shards whose sums are there */
    kt_lowered lowered[KT_PHASES];
    float *t[KT_MATRICES]; /* [slots][rank]; none without an adapter */
    size_t num_shards;
    kt_shard_job shards[KT_SHARDS_MAX];
} kt_job;

/* Whether there is a phase B. */
static inline bool kt_sums(const kt_job *j) { return j->batch.stages == KT_ALL_STAGES || j->batch.stages == KT_DOWN; }

/* What one worker does of a shard's job. */
typedef struct kt_worker_job {
    kt_job *job;
    kt_shard_job *shard;
    const kt_worker_scratch *scratch;
    kt_hand lists[KT_PHASES]; /* where it is in each */
    kt_run runs[KT_PHASES];   /* that it has taken, from the item on that comes next */
} kt_worker_job;

/* Panels that a worker reads next; panel[0] NULL: nothing is known. */
typedef struct kt_ahead {
    const uint8_t *panel[2];
    size_t bytes;
} kt_ahead;

void kt_job_begin(kt_job *j, const kt_layer *layer, const kt_batch *batch, const kt_teams *teams);
/* Says which forms of x are copied; returns how many rows. There is a route by now. used: whether an expert that has rows takes
 * a form. */
size_t kt_job_stages(kt_job *j, const bool *used);

size_t kt_scratch_chunk(kt_job *j); /* the most tokens that fit into the scratch memory, for which it is planned now */
bool kt_scratch_have(kt_job *j, size_t tokens); /* gives all arrays of a job their places; false where memory is refused */

void kt_phase_a(kt_worker_job *w);
void kt_phase_b(kt_worker_job *w);
kt_ahead kt_ahead_b(kt_worker_job *w); /* the first panels of phase B */
/* kt_run_advance() in a phase's list. */
static inline size_t kt_advance(kt_worker_job *w, kt_phase phase, size_t items) {
    return kt_run_advance(&w->shard->lists->of[phase], &w->lists[phase], &w->runs[phase], items);
}

void kt_phases(void *job, const kt_worker *me); /* a kt_task */

#endif
