/* The gradients of dense matrices' inputs.
 *
 * SHAPES      grad_y [tokens][n], W [n][k] in panels of 64 outputs, grad_x [tokens][k], for each matrix of the call
 * DEFINITION  step 1: rows of grad_y, times their factors, as products take them
 *             step 2: for each pair of panels of grad_x, for each strip of rows, one chain:
 *                 sum = rows of the first matrix times its W; where matrices are summed, it goes on with those of the next ones
 *             step 3, with shards: grad_x = round(the shards' sums, added in their order)
 * ITEM        of step 2: a pair of panels and a strip. Strips of one pair follow one another, since they decode the same weights.
 * SHARDS      each has some rows n of every matrix, and sums these.
 * REGULARITIES a row's sums are in ascending n, matrix by matrix, within a shard, and shards are added in their order: bits depend on how
 *             many shards there are, and on no batch, thread or chunk.
 */
#include "backward/linear.h"

#include <errno.h>
#include <string.h>

#include "backward/backward.h"
#include "backward/step.h"
#include "backward/transposed.h"
#include "base/pool.h"
#include "forward/tuning.h"

typedef struct worker_scratch {
    kt_product_scratch product;
    uint16_t *row; /* of grad_y */
} worker_scratch;

typedef struct shard_job {
    size_t workers, longest_row;
    kt_product_rows *rows;   /* [matrices], [tokens] each */
    float *sums;             /* [results][tokens][inputs, padded]; NULL: there is one shard, whose sums are the results */
    worker_scratch *scratch; /* [workers] */
} shard_job;

typedef struct job {
    const kt_linear_gradients *call;
    kt_products products[KT_LINEARS_MAX];
    size_t kernel_bytes; /* that the products need at most */
    const kt_isa *isa;   /* the one of the call's instruction sets that has state, or any */
    size_t panels;       /* of inputs */
    size_t results;      /* grad_x that are written */
    size_t num_shards;
    size_t first; /* of the call's tokens: a chunk */
    kt_piece all; /* the chunk's tokens */
    size_t strip_rows, num_strips;
    shard_job shards[KT_SHARDS_MAX];
} job;

_Static_assert(sizeof(job) <= 16 << 10, "on the caller's stack, which may be small");

static const kt_shard *shard_of(const job *j, size_t i, size_t shard) { return &j->call->of[i].layer->shards[shard]; }

static void begin(job *j, const kt_linear_gradients *call, const kt_teams *teams) {
    const kt_layer *l = call->of[0].layer;
    *j = (job){
        .call = call,
        .isa = l->isa,
        .panels = kt_round_up(call->inputs, KT_PANEL) / KT_PANEL,
        .results = call->summed ? 1 : call->count,
        .num_shards = kt_shards_of(l->placement),
    };
    for (size_t i = 0; i < call->count; i++) {
        const kt_isa *isa = call->of[i].layer->isa;
        if (isa->enter) j->isa = isa;
        j->products[i] = kt_products_of(isa);
        if (j->products[i].scratch_bytes > j->kernel_bytes) j->kernel_bytes = j->products[i].scratch_bytes;
    }
    for (size_t p = 0; p < j->num_shards; p++) {
        j->shards[p].workers = teams->of[p].size;
        for (size_t i = 0; i < call->count; i++) {
            const size_t outputs = kt_round_up(shard_of(j, i, p)->intermediate, KT_PANEL);
            if (outputs > j->shards[p].longest_row) j->shards[p].longest_row = outputs;
        }
    }
}

static size_t lay_out(job *j, uint8_t *base) {
    kt_carver c = {base, 0};
    for (shard_job *p = j->shards; p < j->shards + j->num_shards; p++) {
        p->rows = kt_carve(&c, j->call->count, sizeof *p->rows);
        p->scratch = kt_carve(&c, p->workers, sizeof *p->scratch);
    }
    return c.used;
}

/* Lays out what one shard's threads touch. lay_out() comes before. */
static size_t lay_out_shard(job *j, size_t shard, uint8_t *base) {
    kt_carver c = {base, 0};
    shard_job *p = &j->shards[shard];
    for (size_t i = 0; i < j->call->count; i++) {
        const size_t panels = kt_round_up(shard_of(j, i, shard)->intermediate, KT_PANEL) / KT_PANEL;
        const kt_product_rows rows = kt_product_rows_carve(&j->products[i], &c, j->all.count, panels);
        if (base) p->rows[i] = rows;
    }
    const size_t sums = j->results * j->all.count * j->panels;
    p->sums = j->num_shards > 1 ? kt_carve(&c, sums, sizeof(kt_panel_row)) : NULL;
    for (size_t i = 0; i < p->workers; i++) {
        worker_scratch s = {.product = kt_product_scratch_carve(j->kernel_bytes, &c)};
        s.row = kt_carve(&c, p->longest_row, sizeof *s.row);
        if (base) p->scratch[i] = s;
    }
    return c.used;
}

enum { TOO_LARGE = -1 }; /* more memory than the bound, for more than one token */

/* Gives all arrays of a chunk of so many tokens their places. 0, TOO_LARGE or an errno. */
static int have(job *j, size_t tokens) {
    j->all.count = tokens;
    kt_arena_sizes sizes = {
        .placement = j->call->of[0].layer->placement, .bound = kt_moe_tuning.scratch_bytes, .common = lay_out(j, NULL)};
    size_t all = sizes.common;
    for (size_t p = 0; p < j->num_shards; p++) all += sizes.of[p] = lay_out_shard(j, p, NULL);
    if (all > sizes.bound && tokens > 1) return TOO_LARGE;
    kt_arenas *arenas = kt_backward_arenas();
    if (!kt_arenas_have(arenas, &sizes)) return ENOMEM;
    lay_out(j, arenas->common.base);
    for (size_t p = 0; p < j->num_shards; p++) lay_out_shard(j, p, arenas->of[p].base);
    return 0;
}

/* A matrix and KT_TILE_ROWS rows of its grad_y. */
static void enter(void *context, size_t shard, size_t place, size_t number) {
    const job *j = context;
    const size_t tiles = (j->all.count + KT_TILE_ROWS - 1) / KT_TILE_ROWS, i = number / tiles;
    const kt_linear_gradient *of = &j->call->of[i];
    const kt_shard *own = shard_of(j, i, shard);
    const kt_product_rows *rows = &j->shards[shard].rows[i];
    const kt_given_rows from = {
        .x = (const uint8_t *)of->grad_y + own->first * kt_number_bytes(j->call->dtype),
        .dtype = j->call->dtype,
        .columns = own->intermediate,
        .stride = of->stride,
        .k = rows->k,
    };
    uint16_t *row = j->shards[shard].scratch[place].row;
    for (size_t t = number % tiles * KT_TILE_ROWS, end = t + kt_columns(j->all.count, t, KT_TILE_ROWS); t < end; t++) {
        const uint16_t *given = kt_given_row(&from, j->first + t, NULL, row);
        if (given != row) memcpy(row, given, rows->k * sizeof *row); /* the caller's, which stays as it is */
        kt_product_put(&j->products[i], &own->experts[0].gate, rows, &j->all, t, 0, rows->k, row);
    }
}

static float *sums_of(const job *j, size_t shard, size_t result, size_t row) {
    return j->shards[shard].sums + (result * j->all.count + row) * j->panels * KT_PANEL;
}

/* Writes so many columns of a row of a result, from a panel on. */
static void store(const job *j, size_t result, size_t row, size_t panel, size_t panels, const float *from) {
    const kt_linear_gradient *of = &j->call->of[result];
    const size_t column = panel * KT_PANEL, columns = kt_columns(j->call->inputs, column, panels * KT_PANEL);
    kt_store(from, columns, of->grad_x, j->call->x_dtype, (j->first + row) * of->x_stride + column);
}

static void multiply(void *context, size_t shard, size_t place, size_t number) {
    const job *j = context;
    const shard_job *p = &j->shards[shard];
    const kt_product_scratch *s = &p->scratch[place].product;
    const size_t pairs = (j->panels + 1) / 2, first = number % j->num_strips * j->strip_rows;
    const size_t panel = number / j->num_strips % pairs * 2, result = number / j->num_strips / pairs;
    kt_transposed t = {
        .k = kt_round_up(j->call->inputs, KT_BLOCK),
        .piece = &j->all,
        .first = first,
        .m = kt_columns(j->all.count, first, j->strip_rows),
        .panel = panel,
        .panels = kt_columns(j->panels, panel, 2),
    };
    for (size_t i = result; i < (j->call->summed ? j->call->count : result + 1); i++) {
        t.products = &j->products[i];
        t.matrix = &shard_of(j, i, shard)->experts[0].gate;
        t.rows = &p->rows[i];
        t.add = i > result;
        kt_transposed_product(s, &t);
    }
    for (size_t r = 0; r < t.m; r++)
        for (size_t i = 0; i < t.panels; i++) {
            if (p->sums)
                memcpy(sums_of(j, shard, result, first + r) + (panel + i) * KT_PANEL, s->out[i][r], sizeof s->out[i][r]);
            else
                store(j, result, first + r, panel + i, 1, s->out[i][r]);
        }
}

/* A row of a result. */
static void add(void *context, size_t shard, size_t place, size_t number) {
    (void)shard, (void)place;
    const job *j = context;
    const size_t result = number / j->all.count, row = number % j->all.count;
    float *restrict to = sums_of(j, 0, result, row);
    for (size_t p = 1; p < j->num_shards; p++) {
        const float *restrict from = sums_of(j, p, result, row);
        for (size_t c = 0; c < j->call->inputs; c++) to[c] += from[c];
    }
    store(j, result, row, 0, j->panels, to);
}

static int run(job *j, void (*item)(void *, size_t, size_t, size_t), size_t count, bool shared) {
    kt_items items = {.isa = j->isa, .placement = j->call->of[0].layer->placement, .job = j, .item = item, .shared = shared};
    for (size_t p = 0; p < j->num_shards; p++) items.of[p].count = count;
    return kt_items_run(&items);
}

static int chunk(job *j) {
    const size_t tokens = j->all.count, tiles = (tokens + KT_TILE_ROWS - 1) / KT_TILE_ROWS;
    j->strip_rows = kt_call_rows(tokens);
    j->num_strips = (tokens + j->strip_rows - 1) / j->strip_rows;
    int error = run(j, enter, j->call->count * tiles, false);
    if (!error) error = run(j, multiply, j->results * ((j->panels + 1) / 2) * j->num_strips, false);
    if (!error && j->num_shards > 1) error = run(j, add, j->results * tokens, true);
    return error;
}

int kt_linear_backward(const kt_linear_gradients *call) {
    const kt_teams *teams = kt_pool_teams(call->of[0].layer->placement);
    if (!teams) return ENOMEM;
    job j;
    begin(&j, call, teams);
    for (size_t most = call->tokens; j.first < call->tokens; j.first += j.all.count) {
        size_t tokens = kt_columns(call->tokens, j.first, most);
        int error;
        while ((error = have(&j, tokens)) == TOO_LARGE) tokens = most = (tokens + 1) / 2;
        if (!error) error = chunk(&j);
        if (error) return error;
    }
    return 0;
}
