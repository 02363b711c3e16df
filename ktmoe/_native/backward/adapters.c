/* Gradients of an adapter: dB[n] = sum over an expert's rows of dV[n] T, dA[:, k] = sum of dT x[k]; of down with r_w where y has it.
 *
 * REGULARITIES each number is one chain over its expert's rows in ascending token, from 0 or from what is added to: an item has all of a
 *              window's rows, and the next window's go on.
 */
#include <string.h>

#include "backward/rows.h"

static size_t blocks(size_t columns) { return (columns + KT_TILE_COLUMNS - 1) / KT_TILE_COLUMNS; }

/* Blocks of hidden columns are dealt to shards by turns. */
static size_t hidden_blocks(const kt_back_job *j, const kt_back_shard *p) {
    const size_t shard = (size_t)(p - j->shards);
    return (blocks(j->layer->hidden) + j->num_shards - 1 - shard) / j->num_shards;
}

static bool wanted(const kt_back_job *j, size_t matrix) { return kt_adapter_of(j, matrix) && j->to.of[matrix].a; }

static size_t items(const kt_back_job *j, const kt_back_shard *p) {
    if (!wanted(j, KT_OF_GATE) && !wanted(j, KT_OF_UP) && !wanted(j, KT_OF_DOWN)) return 0;
    return j->num_pieces * (blocks(p->shard->intermediate) + hidden_blocks(j, p));
}

/* Rows [row, row + m) of an expert, `columns` of a matrix's inputs or outputs from `first` on. */
typedef struct part {
    size_t expert, row, m, first, columns;
    bool add;
} part;

/* What stands beside the rows: T or dT, times what multiplies gradients, and times router weights. */
static const float *beside(const kt_back_worker *w, const part *at, size_t matrix, bool gradient, bool weighted) {
    const kt_back_job *j = w->job;
    const size_t rank = j->to.batch.adapter->rank;
    for (size_t r = 0; r < at->m; r++) {
        const size_t slot = at->row + r;
        const float *from =
            gradient ? j->dt[matrix] + slot * rank : j->kept.t + (kt_kept_row(j, slot) * KT_MATRICES + matrix) * rank;
        const float by = weighted ? j->to.scale * kt_output_weight_of(j, slot) : j->to.scale;
        for (size_t i = 0; i < rank; i++) w->scratch->wide_t[r * rank + i] = by * from[i];
    }
    return w->scratch->wide_t;
}

/* dA += beside^T rows; the matrix has k inputs. */
static void add_a(const kt_back_worker *w, const part *at, size_t matrix, size_t k) {
    const kt_back_job *j = w->job;
    const size_t rank = j->to.batch.adapter->rank;
    j->layer->isa->dense(&(kt_dense){
        .a = beside(w, at, matrix, true, matrix == KT_OF_DOWN),
        .b = w->scratch->wide,
        .a_row = 1,
        .a_k = rank,
        .b_row = KT_TILE_COLUMNS,
        .c = j->to.of[matrix].a + at->expert * rank * k + at->first,
        .c_row = k,
        .m = rank,
        .n = at->columns,
        .k = at->m,
        .add = at->add,
    });
}

/* dB += rows^T beside; the matrix has n outputs. */
static void add_b(const kt_back_worker *w, const part *at, size_t matrix, size_t n) {
    const kt_back_job *j = w->job;
    const size_t rank = j->to.batch.adapter->rank;
    j->layer->isa->dense(&(kt_dense){
        .a = w->scratch->wide,
        .b = beside(w, at, matrix, false, matrix == KT_OF_DOWN),
        .a_row = 1,
        .a_k = KT_TILE_COLUMNS,
        .b_row = rank,
        .c = j->to.of[matrix].b + (at->expert * n + at->first) * rank,
        .c_row = rank,
        .m = at->columns,
        .n = rank,
        .k = at->m,
        .add = at->add,
    });
}

static void hidden_part(const kt_back_worker *w, const part *at) {
    const kt_back_job *j = w->job;
    float *wide = w->scratch->wide;
    if (wanted(j, KT_OF_GATE) || wanted(j, KT_OF_UP))
        for (size_t r = 0; r < at->m; r++) kt_expert_x_wide(j, at->row + r, at->first, at->columns, wide + r * KT_TILE_COLUMNS);
    for (size_t matrix = KT_OF_GATE; matrix <= KT_OF_UP; matrix++)
        if (wanted(j, matrix)) add_a(w, at, matrix, j->layer->hidden);
    if (!wanted(j, KT_OF_DOWN)) return;
    for (size_t r = 0; r < at->m; r++) kt_dy_wide(j, at->row + r, at->first, at->columns, wide + r * KT_TILE_COLUMNS);
    add_b(w, at, KT_OF_DOWN, j->layer->hidden);
}

static void widen_rows(const kt_back_worker *w, const part *at, const uint16_t *rows) {
    const kt_shard *own = w->shard->shard;
    for (size_t r = 0; r < at->m; r++)
        w->job->layer->isa->widen(rows + (at->row + r) * own->intermediate + at->first - own->first,
                                  w->scratch->wide + r * KT_TILE_COLUMNS, at->columns);
}

static void inner_part(const kt_back_worker *w, const part *at) {
    const kt_back_job *j = w->job;
    for (size_t matrix = KT_OF_GATE; matrix <= KT_OF_UP; matrix++) {
        if (!wanted(j, matrix)) continue;
        widen_rows(w, at, w->shard->plain[matrix]);
        add_b(w, at, matrix, j->intermediate);
    }
    if (!wanted(j, KT_OF_DOWN)) return;
    widen_rows(w, at, w->shard->h);
    add_a(w, at, KT_OF_DOWN, j->intermediate);
}

static void item(const kt_back_worker *w, size_t number) {
    const kt_back_job *j = w->job;
    const kt_back_shard *p = w->shard;
    const size_t inner = blocks(p->shard->intermediate), each = inner + hidden_blocks(j, p), block = number % each;
    const kt_piece *piece = &j->pieces[number / each];
    const bool of_hidden = block >= inner;
    const size_t place = of_hidden ? (block - inner) * j->num_shards + (size_t)(p - j->shards) : block;
    const size_t first = place * KT_TILE_COLUMNS;
    part at = {
        .expert = piece->expert,
        .first = of_hidden ? first : p->shard->first + first,
        .columns = kt_columns(of_hidden ? j->layer->hidden : p->shard->intermediate, first, KT_TILE_COLUMNS),
        .add = j->to.add || j->written[piece->expert],
    };
    for (size_t i = 0; i < piece->count; i += KT_TILE_ROWS) {
        at.row = piece->first + i;
        at.m = kt_columns(piece->count, i, KT_TILE_ROWS);
        (of_hidden ? hidden_part : inner_part)(w, &at);
        at.add = true;
    }
}

const kt_step kt_step_adapters = {items, item, false};

static size_t experts(const kt_back_job *j, const kt_back_shard *p) {
    (void)p;
    return j->to.add ? 0 : j->layer->num_experts;
}

/* Sets the gradients of an expert that had no rows to 0. */
static void clear(const kt_back_worker *w, size_t expert) {
    const kt_back_job *j = w->job;
    if (j->written[expert]) return;
    for (size_t matrix = 0; matrix < KT_MATRICES; matrix++) {
        if (!wanted(j, matrix)) continue;
        const size_t down = matrix == KT_OF_DOWN, rank = j->to.batch.adapter->rank;
        const size_t a = rank * (down ? j->intermediate : j->layer->hidden),
                     b = rank * (down ? j->layer->hidden : j->intermediate);
        memset(j->to.of[matrix].a + expert * a, 0, a * sizeof(float));
        memset(j->to.of[matrix].b + expert * b, 0, b * sizeof(float));
    }
}

const kt_step kt_step_clear = {experts, clear, true};
