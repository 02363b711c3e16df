/* The forward pass of dense matrices.
 *
 * SHAPES      x [tokens][k], W [n][k] in panels of 64 outputs, y [tokens][n], for each matrix of the call
 * DEFINITION  for each strip of rows, for each panel of each matrix, two neighbours together:
 *                 y[strip][panel] = round(finish(x[strip] W[panel]^T))
 * ITEM        a strip and a panel. The panels of all matrices of the call are counted one after another.
 * SHARDS      each has some rows of every matrix, and writes those columns of y. No sum goes across shards.
 * REGULARITIES an output has one order of sums, the kernel's: no bit depends on the batch, the threads or the shards.
 */
#include "forward/linear.h"

#include <errno.h>
#include <string.h>

#include "base/cpu.h"
#include "base/pool.h"
#include "forward/arenas.h"
#include "forward/calls.h"
#include "forward/rows.h"
#include "forward/runs.h"
#include "forward/staging.h"
#include "forward/tuning.h"

/* x as a matrix takes it. Matrices that take the same share it. */
typedef struct source {
    kt_given_rows from;
    const kt_rows *rows;
    size_t same; /* the first matrix that takes this */
    bool stage;  /* rows are copied; else the caller's are used where they are */
    size_t stride_bytes;
    uint8_t *staged;
    const void **x; /* [tokens] rows */
} source;

typedef struct worker_scratch {
    kt_panel_row *out[2]; /* [KT_ROWS_MAX] each */
    uint16_t *row;        /* of x, before it is encoded */
    void *kernel;
} worker_scratch;

typedef struct shard_job {
    const kt_team *team;
    size_t panels;
    kt_list list;
    worker_scratch *workers;
} shard_job;

typedef struct job {
    const kt_linears *call;
    const kt_teams *teams;
    size_t first, tokens; /* of the call: a chunk */
    size_t strip_rows, num_strips;
    uint64_t *cost; /* [num_strips + 1]: of one item of each strip before */
    uint16_t *row;  /* [longest_row]: of x before it is encoded, where the caller stages it */
    size_t longest_row, kernel_scratch_bytes;
    const kt_isa *isa; /* the one of the call's instruction sets that has state, or any */
    kt_staging staging;
    source sources[KT_LINEARS_MAX];
    shard_job shards[KT_SHARDS_MAX];
} job;

_Static_assert(sizeof(job) <= 16 << 10, "on the caller's stack, which may be small");

static const kt_matrix *matrix_of(const kt_layer *l, size_t shard) { return &l->shards[shard].experts[0].gate; }

static size_t panels_of(const kt_layer *l, size_t shard) {
    return kt_round_up(l->shards[shard].intermediate, KT_PANEL) / KT_PANEL;
}

static size_t num_shards(const job *j) { return kt_shards_of(j->call->of[0].layer->placement); }

static bool same_rule(const kt_block_rule *a, const kt_block_rule *b) { return a == b || (a && b && !memcmp(a, b, sizeof *a)); }

static bool same_source(const source *a, const source *b) {
    return a->rows == b->rows && a->from.x == b->from.x && a->from.columns == b->from.columns &&
           same_rule(a->from.rule, b->from.rule);
}

static void begin(job *j, const kt_linears *call, const kt_teams *teams) {
    *j = (job){.call = call, .teams = teams, .isa = call->of[0].layer->isa};
    for (size_t i = 0; i < call->count; i++) {
        const kt_layer *l = call->of[i].layer;
        source *s = &j->sources[i];
        const size_t k = kt_round_up(l->hidden, KT_BLOCK);
        if (l->isa->enter) j->isa = l->isa;
        s->from = (kt_given_rows){(const uint8_t *)call->x + call->of[i].column * kt_number_bytes(call->dtype),
                                  call->dtype,
                                  l->hidden,
                                  call->stride,
                                  k,
                                  l->round_x};
        s->rows = matrix_of(l, 0)->kernel->rows; /* all shards of a matrix have one kernel */
        s->stride_bytes = kt_row_bytes(s->rows->block_bytes, k);
        while (!same_source(&j->sources[s->same], s)) s->same++;
        if (k > j->longest_row) j->longest_row = k;
        if (l->kernel_scratch_bytes > j->kernel_scratch_bytes) j->kernel_scratch_bytes = l->kernel_scratch_bytes;
        for (size_t p = 0; p < num_shards(j); p++) j->shards[p].panels += panels_of(l, p);
    }
    for (size_t p = 0; p < num_shards(j); p++) j->shards[p].team = &teams->of[p];
}

static bool is_first(const job *j, size_t i) { return j->sources[i].same == i; }

/* Cuts a chunk's rows, and says which rows of x are copied. */
static void plan(job *j, size_t tokens) {
    size_t panels = SIZE_MAX;
    for (size_t p = 0; p < num_shards(j); p++) panels = j->shards[p].panels < panels ? j->shards[p].panels : panels;
    const size_t longest = kt_strip_rows(j->teams, 1, tokens, panels), strips = (tokens + longest - 1) / longest;
    j->tokens = tokens;
    j->strip_rows = kt_round_up((tokens + strips - 1) / strips, KT_TILE_ROWS);
    j->num_strips = (tokens + j->strip_rows - 1) / j->strip_rows;
    for (size_t i = 0; i < j->call->count; i++) {
        source *s = &j->sources[i];
        const bool as_it_is = !s->rows->encode && kt_given_as_it_is(&s->from);
        s->stage = !as_it_is || tokens >= (s->rows->tiled ? 2 : KT_STAGE_TOKENS); /* a row alone is a tile, too */
    }
}

/* Gives every array that all shards touch its place; returns the bytes. With base NULL it only adds up. */
static size_t lay_out(job *j, uint8_t *base) {
    kt_carver c = {base, 0};
    j->cost = kt_carve(&c, j->num_strips + 1, sizeof *j->cost);
    j->row = kt_carve(&c, j->longest_row, sizeof *j->row);
    for (size_t i = 0; i < j->call->count; i++) {
        source *s = &j->sources[i];
        if (!is_first(j, i)) continue;
        s->x = kt_carve(&c, j->tokens, sizeof *s->x);
        s->staged = kt_carve_beyond(&c, s->stage ? j->tokens : 0, s->stride_bytes,
                                    s->rows->tiled ? KT_TILE_ROWS * s->rows->block_bytes : 0);
    }
    for (size_t p = 0; p < num_shards(j); p++) {
        kt_list_carve(&j->shards[p].list, &c, j->shards[p].team->num_groups);
        j->shards[p].workers = kt_carve(&c, j->shards[p].team->size, sizeof(worker_scratch));
    }
    return c.used;
}

/* The same of what one shard's threads touch. lay_out() comes before. */
static size_t lay_out_shard(const job *j, const shard_job *p, uint8_t *base) {
    kt_carver c = {base, 0};
    for (size_t i = 0; i < p->team->size; i++) {
        const worker_scratch w = {
            .out = {kt_carve(&c, KT_ROWS_MAX, sizeof(kt_panel_row)), kt_carve(&c, KT_ROWS_MAX, sizeof(kt_panel_row))},
            .row = kt_carve(&c, j->longest_row, sizeof(uint16_t)),
            .kernel = kt_carve(&c, j->kernel_scratch_bytes, 1),
        };
        if (base) p->workers[i] = w;
    }
    return c.used;
}

enum { TOO_LARGE = -1 }; /* more memory than the bound, for more than one token */

/* Gives all arrays their places. 0, TOO_LARGE or an errno. */
static int have(job *j) {
    kt_arena_sizes sizes = {
        .placement = j->call->of[0].layer->placement, .bound = kt_moe_tuning.scratch_bytes, .common = lay_out(j, NULL)};
    size_t all = sizes.common;
    for (size_t p = 0; p < num_shards(j); p++) all += sizes.of[p] = lay_out_shard(j, &j->shards[p], NULL);
    if (all > sizes.bound && j->tokens > 1) return TOO_LARGE;
    kt_arenas *arenas = kt_forward_arenas();
    if (!kt_arenas_have(arenas, &sizes)) return ENOMEM;
    lay_out(j, arenas->common.base);
    for (size_t p = 0; p < num_shards(j); p++) lay_out_shard(j, &j->shards[p], arenas->of[p].base);
    return 0;
}

static void stage_row(const job *j, const source *s, size_t row, uint16_t *own) {
    const bool e2m1 = s->from.rule && s->from.rule->e2m1;
    const size_t left = j->tokens - row / KT_TILE_ROWS * KT_TILE_ROWS;
    kt_row_put(s->rows, e2m1, kt_given_row(&s->from, j->first + row, NULL, own), 0, s->from.k, s->from.k,
               left < KT_TILE_ROWS ? left : KT_TILE_ROWS, (void *)s->x[row]);
}

/* Rows [first, end) of all sources that are copied, one source after another. */
static void stage(const job *j, kt_run run, uint16_t *own) {
    size_t before = 0;
    for (size_t i = 0; i < j->call->count; i++) {
        if (!is_first(j, i) || !j->sources[i].stage) continue;
        for (size_t row = run.first > before ? run.first - before : 0; row < j->tokens && before + row < run.end; row++)
            stage_row(j, &j->sources[i], row, own);
        before += j->tokens;
    }
}

/* Says where rows of x will be, and copies few of them at once. */
static void point_x(job *j) {
    const kt_piece all = {.count = j->tokens};
    size_t rows = 0, bytes = 0;
    for (size_t i = 0; i < j->call->count; i++) {
        source *s = &j->sources[i];
        if (!is_first(j, i)) continue;
        for (size_t row = 0; row < j->tokens; row++)
            s->x[row] = s->stage
                            ? (const void *)kt_row_of(s->rows, s->staged, s->stride_bytes, &all, row)
                            : (const uint8_t *)s->from.x + (j->first + row) * s->from.stride * kt_number_bytes(s->from.dtype);
        if (!s->stage) continue;
        rows += j->tokens;
        bytes += j->tokens * s->from.k * sizeof(uint16_t);
    }
    kt_staging_begin(&j->staging, bytes > KT_STAGE_ALONE_BYTES ? rows : 0);
    if (j->staging.rows || !rows) return;
    const unsigned state = kt_fp_enter();
    stage(j, (kt_run){0, rows}, j->row);
    kt_fp_leave(state);
}

/* Where an item is. */
typedef struct place {
    const kt_linear *of;
    const source *source;
    const kt_matrix *matrix;
    size_t panel, panels;   /* of the matrix in the shard: the item's, and how many there are */
    size_t row, rows;       /* of the chunk */
    size_t column, columns; /* of y: the panel's first one, and how many are left in the shard */
} place;

static place place_of(const job *j, size_t shard, size_t item) {
    const shard_job *p = &j->shards[shard];
    const size_t row = item / p->panels * j->strip_rows, left = j->tokens - row;
    size_t i = 0, panel = item % p->panels, own;
    for (; panel >= (own = panels_of(j->call->of[i].layer, shard)); i++) panel -= own;
    const kt_layer *l = j->call->of[i].layer;
    const kt_shard *s = &l->shards[shard];
    return (place){
        .of = &j->call->of[i],
        .source = &j->sources[j->sources[i].same],
        .matrix = matrix_of(l, shard),
        .panel = panel,
        .panels = own,
        .row = row,
        .rows = left < j->strip_rows ? left : j->strip_rows,
        .column = s->first + panel * KT_PANEL,
        .columns = s->intermediate - panel * KT_PANEL,
    };
}

static const uint8_t *packed(const place *at, size_t panel) {
    return at->matrix->data + (at->panel + panel) * at->matrix->panel_bytes;
}

/* Two streams of weights are read faster than one. */
static size_t panels_together(const place *at, size_t items) { return items > 1 && at->panel + 1 < at->panels ? 2 : 1; }

static void put(const job *j, const place *at, size_t panel, size_t row, size_t m, kt_panel_row *out) {
    const kt_finish f = kt_finish_of(at->matrix, at->panel + panel);
    const size_t columns = at->columns - panel * KT_PANEL;
    kt_finish_rows(out, m, &f);
    for (size_t r = 0; r < m; r++)
        kt_store(out[r], columns < KT_PANEL ? columns : KT_PANEL, at->of->y, j->call->y_dtype,
                 (j->first + row + r) * at->of->stride + at->column + panel * KT_PANEL);
}

static void multiply(const job *j, const worker_scratch *s, const place *at, size_t panels, const kt_dot *next) {
    for (size_t i = 0, m; i < at->rows; i += m) {
        const size_t row = at->row + i;
        m = kt_call_rows(at->rows - i);
        kt_dot dot = i + m == at->rows ? *next : (kt_dot){0};
        dot.x = at->source->x + row;
        dot.m = m;
        dot.k = at->source->from.k;
        dot.panels = panels;
        dot.scale_group = at->matrix->scale_group;
        dot.codebook = at->matrix->codebook;
        dot.scratch = s->kernel;
        for (size_t p = 0; p < panels; p++) {
            dot.w[p] = packed(at, p);
            dot.out[p] = *s->out[p];
        }
        kt_multiply(&dot, at->matrix->kernel);
        for (size_t p = 0; p < panels; p++) put(j, at, p, row, m, s->out[p]);
    }
}

/* What the worker reads next, in a kernel's words. */
static kt_dot ahead(const job *j, size_t shard, const kt_run *run) {
    if (run->first == run->end) return (kt_dot){0};
    const place at = place_of(j, shard, run->first);
    const size_t panels = panels_together(&at, run->end - run->first);
    return (kt_dot){.next = {packed(&at, 0), packed(&at, panels - 1)}, .next_bytes = at.matrix->panel_bytes};
}

static void compute(job *j, size_t shard, const kt_worker *me) {
    const shard_job *p = &j->shards[shard];
    const worker_scratch *s = &p->workers[me->index - p->team->first];
    kt_hand hand = kt_hand_of(&p->list, me);
    kt_run run = {0};
    kt_run_advance(&p->list, &hand, &run, 0);
    while (run.first < run.end) {
        const place at = place_of(j, shard, run.first);
        const size_t panels = panels_together(&at, run.end - run.first);
        kt_run_advance(&p->list, &hand, &run, panels);
        const kt_dot next = ahead(j, shard, &run);
        multiply(j, s, &at, panels, &next);
        if (run.first == run.end) kt_run_advance(&p->list, &hand, &run, 0);
    }
}

static void work(void *context, const kt_worker *me) {
    job *j = context;
    const kt_isa *isa = j->isa;
    const shard_job *own = &j->shards[me->teams->groups[me->group].shard];
    if (isa->enter) isa->enter();
    if (j->staging.rows) {
        for (kt_run run; kt_staging_take(&j->staging, me->teams->workers, &run); kt_staging_done(&j->staging, run))
            stage(j, run, own->workers[me->index - own->team->first].row);
        kt_staging_wait(&j->staging);
    }
    for (size_t p = 0; p < num_shards(j); p++)
        if (kt_serves(me, p)) compute(j, p, me);
    if (isa->leave) isa->leave();
}

static int chunk(job *j) {
    point_x(j);
    j->cost[0] = 0;
    for (size_t i = 0; i < j->num_strips; i++) {
        const size_t left = j->tokens - i * j->strip_rows;
        j->cost[i + 1] = j->cost[i] + kt_strip_cost(left < j->strip_rows ? left : j->strip_rows);
    }
    for (size_t p = 0; p < num_shards(j); p++)
        kt_list_fill(&j->shards[p].list, j->teams, p, j->cost, j->num_strips, j->shards[p].panels);
    return kt_pool_run(work, j, j->call->of[0].layer->placement);
}

int kt_linear_forward(const kt_linears *call) {
    const kt_teams *teams = kt_pool_teams(call->of[0].layer->placement);
    if (!teams) return ENOMEM;
    job j;
    begin(&j, call, teams);
    for (size_t most = call->tokens; j.first < call->tokens; j.first += j.tokens) {
        const size_t left = call->tokens - j.first;
        int error;
        plan(&j, left < most ? left : most);
        while ((error = have(&j)) == TOO_LARGE) plan(&j, most = (j.tokens + 1) / 2);
        if (!error) error = chunk(&j);
        if (error) return error;
    }
    return 0;
}
