/* The gradients of gate and up from that of y: dT = scale * dY B, dH = dY' W + dT A of down, then the activation's derivative.
 *
 * REGULARITIES a slot's gradients depend on its own row alone: dT is one chain over the columns of dY, dH one over those of dY' and then
 *              the rank; its router weight's is a sum for each panel of h, which are added up in their order.
 */
#include <string.h>

#include "backward/added.h"
#include "backward/rows.h"

static size_t strips(const kt_back_job *j, const kt_back_shard *p) {
    (void)p;
    return j->num_strips;
}

/* dT of down and what its bias gives to the router weight's gradient, of rows [row, row + m). */
static void lower_dy(const kt_back_worker *w, size_t expert, size_t row, size_t m) {
    const kt_back_job *j = w->job;
    const kt_back_scratch *s = w->scratch;
    const kt_isa *isa = j->layer->isa;
    const kt_adapter *a = kt_adapter_of(j, KT_OF_DOWN);
    const float *bias = j->layer->shards[0].experts[expert].down.bias;
    const size_t hidden = j->layer->hidden;
    for (size_t first = 0, k; first < hidden; first += k) {
        k = kt_columns(hidden, first, KT_TILE_COLUMNS);
        for (size_t r = 0; r < m; r++) kt_dy_wide(j, row + r, first, k, s->wide + r * KT_TILE_COLUMNS);
        if (bias)
            isa->dense_rows(&(kt_dense_rows){
                .a = s->wide,
                .b = bias + first,
                .a_row = KT_TILE_COLUMNS,
                .c = j->dr_bias + row,
                .c_row = 1,
                .m = m,
                .n = 1,
                .k = k,
                .add = first > 0,
            });
        if (!a) continue;
        const kt_wide b =
            kt_widened(isa, &a->of[KT_OF_DOWN].b, (expert * hidden + first) * a->rank, a->rank, k, a->rank, s->low);
        isa->dense(&(kt_dense){
            .a = s->wide,
            .b = b.at,
            .a_row = KT_TILE_COLUMNS,
            .a_k = 1,
            .b_row = b.stride,
            .c = j->dt[KT_OF_DOWN] + row * a->rank,
            .c_row = a->rank,
            .m = m,
            .n = a->rank,
            .k = k,
            .add = first > 0,
        });
    }
    for (size_t i = 0; a && i < m * a->rank; i++) j->dt[KT_OF_DOWN][row * a->rank + i] *= a->scale;
}

static void enter(const kt_back_worker *w, size_t item) {
    const kt_back_job *j = w->job;
    const kt_back_strip *strip = &j->strips[item];
    const kt_piece *piece = &j->pieces[strip->piece];
    const kt_expert *e = &j->layer->shards[0].experts[piece->expert];
    for (size_t slot = strip->first; slot < strip->first + strip->rows; slot++) {
        kt_dy_row(j, slot, w->scratch->row);
        kt_product_put(&j->products, &e->down, &j->dy, piece, slot - piece->first, 0, j->dy.k, w->scratch->row);
    }
    if (!e->down.bias && !kt_adapter_of(j, KT_OF_DOWN)) return;
    for (size_t i = 0, m; i < strip->rows; i += m) {
        m = kt_columns(strip->rows, i, KT_TILE_ROWS);
        lower_dy(w, piece->expert, strip->first + i, m);
    }
}

const kt_step kt_step_enter = {strips, enter, true};

static size_t pairs(size_t panels) { return (panels + 1) / 2; }

static size_t inner_items(const kt_back_job *j, const kt_back_shard *p) { return j->num_strips * pairs(p->inter_panels); }

/* dg and du of a panel, in the worker's scratch, become rows. */
static void put(const kt_back_worker *w, const kt_back_strip *strip, size_t first, size_t columns) {
    const kt_back_job *j = w->job;
    const kt_back_scratch *s = w->scratch;
    const kt_back_shard *p = w->shard;
    const kt_piece *piece = &j->pieces[strip->piece];
    const kt_expert *e = &p->shard->experts[piece->expert];
    const size_t bytes = columns * sizeof(uint16_t);
    for (size_t r = 0; r < strip->rows; r++) {
        const size_t slot = strip->first + r, i = slot - piece->first, at = slot * p->shard->intermediate + first;
        if (p->plain[KT_OF_GATE]) memcpy(p->plain[KT_OF_GATE] + at, s->dg[r], bytes);
        if (p->plain[KT_OF_UP]) memcpy(p->plain[KT_OF_UP] + at, s->du[r], bytes);
        if (p->h) memcpy(p->h + at, s->h[r], bytes);
        kt_product_put(&j->products, &e->gate, &p->dg, piece, i, first, KT_PANEL, s->dg[r]);
        kt_product_put(&j->products, &e->up, &p->du, piece, i, first, KT_PANEL, s->du[r]);
    }
}

/* Computes what follows from a panel's dH: h, the gradients of gate and up, and the panel's sum for the router weight. */
static void derive(const kt_back_worker *w, const kt_back_strip *strip, size_t panel, float *dh) {
    const kt_back_job *j = w->job;
    const kt_layer *l = j->layer;
    const kt_back_scratch *s = w->scratch;
    const kt_back_shard *p = w->shard;
    const size_t first = panel * KT_PANEL, column = p->shard->first + first;
    const size_t columns = kt_columns(p->shard->intermediate, first, KT_PANEL);
    kt_add_adapter(w, strip, KT_OF_DOWN, j->intermediate, column, columns, dh);
    for (size_t r = 0; r < strip->rows; r++) {
        const size_t at = kt_kept_row(j, strip->first + r) * j->intermediate + column;
        memcpy(s->g[r], j->kept.g + at, columns * sizeof(float));
        memcpy(s->u[r], j->kept.u + at, columns * sizeof(float));
    }
    l->isa->derive(&(kt_derive){
        .g = *s->g,
        .u = *s->u,
        .dh = dh,
        .stride = KT_PANEL,
        .r = l->router_weight == KT_EXPERT_INPUT ? NULL : j->route.slot_weight + j->first + strip->first,
        .by_input = l->router_weight == KT_DOWN_INPUT,
        .m = strip->rows,
        .columns = columns,
        .act = l->act,
        .dg = *s->dg,
        .du = *s->du,
        .h = *s->h,
        .to_stride = KT_PANEL,
        .dr = p->dr + panel * j->slots + strip->first,
    });
    put(w, strip, first, columns);
}

static void inner(const kt_back_worker *w, size_t item) {
    const kt_back_job *j = w->job;
    const kt_back_shard *p = w->shard;
    const size_t each = pairs(p->inter_panels), panel = item % each * 2;
    const kt_back_strip *strip = &j->strips[item / each];
    const kt_piece *piece = &j->pieces[strip->piece];
    const kt_transposed t = {
        .products = &j->products,
        .matrix = &p->shard->experts[piece->expert].down,
        .k = kt_round_up(p->shard->intermediate, KT_BLOCK),
        .rows = &j->dy,
        .piece = piece,
        .first = strip->first - piece->first,
        .m = strip->rows,
        .panel = panel,
        .panels = kt_columns(p->inter_panels, panel, 2),
    };
    kt_transposed_product(&w->scratch->product, &t);
    for (size_t i = 0; i < t.panels; i++) derive(w, strip, panel + i, *w->scratch->product.out[i]);
}

const kt_step kt_step_inner = {inner_items, inner, false};
