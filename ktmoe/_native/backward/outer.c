/* The gradient of x from those of gate and up: dT = scale * dG B, then dX of each slot is dG' Wg + dU' Wu + dTg Ag + dTu Au,
 * and dX of a token is the sum of its slots' in ascending expert; with shards, of each slot's in their order.
 */
#include <string.h>

#include "backward/added.h"
#include "backward/rows.h"

static size_t strips(const kt_back_job *j, const kt_back_shard *p) {
    (void)p;
    return j->num_strips;
}

/* dT of gate or up, of rows [row, row + m). */
static void lower_rows(const kt_back_worker *w, const kt_adapter *a, size_t matrix, size_t expert, size_t row, size_t m) {
    const kt_back_job *j = w->job;
    const kt_back_scratch *s = w->scratch;
    const kt_isa *isa = j->layer->isa;
    float *dt = j->dt[matrix] + row * a->rank;
    for (const kt_back_shard *p = j->shards; p < j->shards + j->num_shards; p++) {
        const size_t all = p->shard->intermediate;
        for (size_t first = 0, k; first < all; first += k) {
            k = kt_columns(all, first, KT_TILE_COLUMNS);
            for (size_t r = 0; r < m; r++)
                isa->widen(p->plain[matrix] + (row + r) * all + first, s->wide + r * KT_TILE_COLUMNS, k);
            const size_t at = (expert * j->intermediate + p->shard->first + first) * a->rank;
            const kt_wide b = kt_widened(isa, &a->of[matrix].b, at, a->rank, k, a->rank, s->low);
            isa->dense(&(kt_dense){
                .a = s->wide,
                .b = b.at,
                .a_row = KT_TILE_COLUMNS,
                .a_k = 1,
                .b_row = b.stride,
                .c = dt,
                .c_row = a->rank,
                .m = m,
                .n = a->rank,
                .k = k,
                .add = p > j->shards || first,
            });
        }
    }
    for (size_t i = 0; i < m * a->rank; i++) dt[i] *= a->scale;
}

/* The router weight's gradient, where it multiplies h or d. */
static void weigh(const kt_back_job *j, size_t slot, bool bias) {
    float sum = 0;
    for (const kt_back_shard *p = j->shards; p < j->shards + j->num_shards; p++)
        for (size_t panel = 0; panel < p->inter_panels; panel++) sum += p->dr[panel * j->slots + slot];
    if (bias) sum += j->dr_bias[slot];
    j->to.grad_weights[j->route.slot_row[j->first + slot]] = sum;
}

static void lower(const kt_back_worker *w, size_t item) {
    const kt_back_job *j = w->job;
    const kt_back_strip *strip = &j->strips[item];
    const size_t expert = j->pieces[strip->piece].expert, end = strip->first + strip->rows;
    const bool bias = j->layer->router_weight == KT_DOWN_OUTPUT && j->layer->shards[0].experts[expert].down.bias;
    for (size_t matrix = KT_OF_GATE; matrix <= KT_OF_UP; matrix++) {
        const kt_adapter *a = kt_adapter_of(j, matrix);
        for (size_t row = strip->first; a && row < end; row += KT_TILE_ROWS)
            lower_rows(w, a, matrix, expert, row, kt_columns(end, row, KT_TILE_ROWS));
    }
    for (size_t slot = strip->first; j->layer->router_weight != KT_EXPERT_INPUT && slot < end; slot++) weigh(j, slot, bias);
}

const kt_step kt_step_lower = {strips, lower, true};

static size_t pairs(size_t panels) { return (panels + 1) / 2; }

static size_t outer_items(const kt_back_job *j, const kt_back_shard *p) {
    (void)p;
    return j->num_strips * pairs(j->hidden_panels);
}

/* What adapters of gate and up add to a panel of dX, in out. */
static void add_adapters(const kt_back_worker *w, const kt_back_strip *strip, size_t panel, float *dx) {
    const kt_back_job *j = w->job;
    const size_t hidden = j->layer->hidden, first = panel * KT_PANEL, columns = kt_columns(hidden, first, KT_PANEL);
    for (size_t matrix = KT_OF_GATE; matrix <= KT_OF_UP; matrix++) kt_add_adapter(w, strip, matrix, hidden, first, columns, dx);
}

static float *dx_of(const kt_back_job *j, const kt_back_shard *p, size_t slot) {
    return p->dx + slot * j->hidden_panels * KT_PANEL;
}

static void outer(const kt_back_worker *w, size_t item) {
    const kt_back_job *j = w->job;
    const kt_back_shard *p = w->shard;
    const size_t each = pairs(j->hidden_panels), panel = item % each * 2;
    const kt_back_strip *strip = &j->strips[item / each];
    const kt_piece *piece = &j->pieces[strip->piece];
    const kt_expert *e = &p->shard->experts[piece->expert];
    kt_transposed t = {
        .products = &j->products,
        .matrix = &e->gate,
        .k = j->k_hidden,
        .rows = &p->dg,
        .piece = piece,
        .first = strip->first - piece->first,
        .m = strip->rows,
        .panel = panel,
        .panels = kt_columns(j->hidden_panels, panel, 2),
    };
    kt_transposed_product(&w->scratch->product, &t);
    t.matrix = &e->up;
    t.rows = &p->du;
    t.add = true;
    kt_transposed_product(&w->scratch->product, &t);
    for (size_t i = 0; i < t.panels; i++) {
        kt_panel_row *dx = w->scratch->product.out[i];
        if (p == j->shards) add_adapters(w, strip, panel + i, *dx);
        for (size_t r = 0; r < strip->rows; r++)
            memcpy(dx_of(j, p, strip->first + r) + (panel + i) * KT_PANEL, dx[r], sizeof *dx);
    }
}

const kt_step kt_step_outer = {outer_items, outer, false};

enum { SUM_TOKENS = 4 };

static size_t sum_items(const kt_back_job *j, const kt_back_shard *p) {
    (void)p;
    return (j->to.batch.tokens + SUM_TOKENS - 1) / SUM_TOKENS;
}

static void add(float *restrict to, const float *restrict from, size_t count, float by) {
    for (size_t c = 0; c < count; c++) to[c] += by * from[c];
}

/* A slot's dX, of all shards. */
static float *slot_dx(const kt_back_job *j, size_t slot) {
    float *dx = dx_of(j, &j->shards[0], slot);
    for (const kt_back_shard *p = j->shards + 1; p < j->shards + j->num_shards; p++)
        add(dx, dx_of(j, p, slot), j->layer->hidden, 1.0f);
    return dx;
}

/* The router weight's gradient where it multiplies x: the sum of x dX'. */
static void weigh_x(const kt_back_worker *w, size_t token, size_t slot, const float *dx) {
    const kt_back_job *j = w->job;
    float *to = &j->to.grad_weights[j->route.slot_row[j->first + slot]];
    for (size_t first = 0, k; first < j->layer->hidden; first += k) {
        k = kt_columns(j->layer->hidden, first, KT_TILE_COLUMNS);
        kt_x_wide(j, token, first, k, w->scratch->wide);
        j->layer->isa->dense_rows(
            &(kt_dense_rows){.a = w->scratch->wide, .b = dx + first, .c = to, .m = 1, .n = 1, .k = k, .add = first > 0});
    }
}

/* A token's dX of the window's slots, which go on with those of the windows before. */
static void sum_token(const kt_back_worker *w, size_t token) {
    const kt_back_job *j = w->job;
    const size_t hidden = j->layer->hidden, top_k = j->to.batch.top_k;
    const bool input = j->layer->router_weight == KT_EXPERT_INPUT, f32 = j->to.batch.dtype == KT_F32;
    float *y = w->scratch->sum;
    if (j->to.grad_x && f32) y = (float *)j->to.grad_x + token * hidden;
    if (j->sums) y = j->sums + token * hidden;
    if (!j->first) memset(y, 0, hidden * sizeof *y);
    for (size_t s = 0; s < j->route.token_count[token]; s++) {
        const size_t slot = j->route.token_slots[token * top_k + s] - j->first;
        if (slot >= j->slots) continue; /* of another window: the difference wraps */
        const float *dx = slot_dx(j, slot);
        if (input) weigh_x(w, token, slot, dx);
        if (j->to.grad_x) add(y, dx, hidden, input ? kt_weight_of(j, slot) : 1.0f);
    }
    if (!j->last || !j->to.grad_x || f32) return;
    uint16_t *restrict to = (uint16_t *)j->to.grad_x + token * hidden;
    for (size_t c = 0; c < hidden; c++) to[c] = kt_bf16_from_f32(y[c]);
}

static void sum(const kt_back_worker *w, size_t item) {
    for (size_t t = item * SUM_TOKENS; t < (item + 1) * SUM_TOKENS && t < w->job->to.batch.tokens; t++) sum_token(w, t);
}

const kt_step kt_step_sum = {sum_items, sum, true};
