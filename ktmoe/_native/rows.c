/* Rows of x and h, where they are and as the kernels that take them want them. */
#include "moe.h"

/* Rows are a cache line apart from a power of two: 12 rows of 8 KiB would fall on one set of an L1 that has 8 ways. Copying x for
 * that pays from a few tokens on. */
enum { ROW_PAD_BYTES = 64, STAGE_TOKENS = 6 };

size_t kt_row_bytes(size_t group_bytes, size_t k) { return kt_round_up(k / KT_GROUP * group_bytes, 64) + ROW_PAD_BYTES; }

uint8_t *kt_row_of(const kt_rows *rows, uint8_t *base, size_t stride_bytes, const group *g, size_t i) {
    if (!rows->tiled) return base + (g->first + i) * stride_bytes;
    return base + (g->first + i / KT_TILE_ROWS * KT_TILE_ROWS) * stride_bytes + i % KT_TILE_ROWS * rows->group_bytes;
}

void kt_row_put(const kt_rows *rows, const uint16_t *x, size_t first, size_t count, size_t k, size_t together, void *row) {
    if (rows->encode) {
        rows->encode(x, first, count, k, row);
        return;
    }
    const size_t stride = rows->group_bytes * (rows->tiled ? together : 1);
    for (size_t at = 0; at < count; at += KT_GROUP)
        memcpy((uint8_t *)row + (first + at) / KT_GROUP * stride, x + at, KT_GROUP * sizeof *x);
}

void kt_x_point(const x_source *s, x_kind *x) {
    const route *r = s->route;
    const kt_layer *l = s->layer;
    const bool as_it_is =
        !x->rows->encode && s->batch->dtype == KT_BF16 && s->k == l->hidden && l->router_weight != KT_EXPERT_INPUT;
    /* A row alone is a tile, too. */
    x->stage = !as_it_is || (x->rows->tiled ? r->num_slots > r->num_groups : s->batch->tokens >= STAGE_TOKENS);
    for (const group *g = r->groups; g < r->groups + r->num_groups; g++)
        for (size_t slot = g->first, i = 0; i < g->count; slot++, i++) {
            if (!x->stage)
                x->x[slot] = (const uint16_t *)s->batch->x + r->slot_token[slot] * l->hidden;
            else if (x->by_slot)
                x->x[slot] = kt_row_of(x->rows, x->staged, x->stride_bytes, g, i);
            else
                x->x[slot] = x->staged + r->slot_token[slot] * x->stride_bytes;
        }
}

/* A row of x as kernels take it: rounded to bf16, scaled and padded as needed. */
static void stage_row(const x_source *s, const x_kind *to, size_t row, uint16_t *restrict own) {
    const size_t hidden = s->layer->hidden;
    const bool scaled = s->layer->router_weight == KT_EXPERT_INPUT;
    const size_t token = to->by_slot ? s->route->slot_token[row] : row;
    const uint16_t *bf16 = (const uint16_t *)s->batch->x + token * hidden;
    if (s->batch->dtype != KT_BF16 || scaled || hidden != s->k) {
        const float *restrict f32 = (const float *)s->batch->x + token * hidden;
        if (s->batch->dtype == KT_BF16)
            memcpy(own, bf16, hidden * sizeof *own);
        else
            for (size_t c = 0; c < hidden; c++) own[c] = kt_bf16_from_f32(f32[c]);
        if (scaled) {
            const float r = s->route->slot_weight[row];
            for (size_t c = 0; c < hidden; c++) own[c] = kt_bf16_from_f32(kt_bf16_to_f32(own[c]) * r);
        }
        memset(own + hidden, 0, (s->k - hidden) * sizeof *own);
        bf16 = own;
    }
    if (to->by_slot)
        kt_row_put(to->rows, bf16, 0, s->k, s->k, s->together[row], (void *)to->x[row]);
    else
        kt_row_put(to->rows, bf16, 0, s->k, s->k, 1, to->staged + row * to->stride_bytes);
}

void kt_x_stage(const x_source *s, const x_kind *x, size_t worker, size_t workers, uint16_t *row) {
    const size_t rows = x->by_slot ? s->route->num_slots : s->batch->tokens;
    for (size_t i = rows * worker / workers; i < rows * (worker + 1) / workers; i++) stage_row(s, x, i, row);
}
