/* Rows of x and h, where they are and as the kernels that take them want them. */
#include "forward/rows.h"

/* Rows are a cache line apart from a power of two: 12 rows of 8 KiB would fall on one set of an L1 that has 8 ways. */
enum { ROW_PAD_BYTES = 64 };

size_t kt_row_bytes(size_t block_bytes, size_t k) { return kt_round_up(k / KT_BLOCK * block_bytes, 64) + ROW_PAD_BYTES; }

uint8_t *kt_row_of(const kt_rows *rows, uint8_t *base, size_t stride_bytes, const kt_piece *e, size_t i) {
    if (!rows->tiled) return base + (e->first + i) * stride_bytes;
    return base + (e->first + i / KT_TILE_ROWS * KT_TILE_ROWS) * stride_bytes + i % KT_TILE_ROWS * rows->block_bytes;
}

void kt_row_put(const kt_rows *rows, bool e2m1, const uint16_t *x, size_t first, size_t count, size_t k, size_t together,
                void *row) {
    if (rows->encode) {
        (e2m1 && rows->encode_e2m1 ? rows->encode_e2m1 : rows->encode)(x, first, count, k, row);
        return;
    }
    const size_t stride = rows->block_bytes * (rows->tiled ? together : 1);
    for (size_t at = 0; at < count; at += KT_BLOCK)
        memcpy((uint8_t *)row + (first + at) / KT_BLOCK * stride, x + at, KT_BLOCK * sizeof *x);
}

bool kt_given_as_it_is(const kt_given_rows *from) { return from->dtype == KT_BF16 && from->columns == from->k && !from->rule; }

const uint16_t *kt_given_row(const kt_given_rows *from, size_t row, const float *r, uint16_t *restrict own) {
    const size_t columns = from->columns;
    const uint16_t *bf16 = (const uint16_t *)from->x + row * from->stride;
    if (!r && kt_given_as_it_is(from)) return bf16;
    const float *restrict f32 = (const float *)from->x + row * from->stride;
    if (from->dtype == KT_BF16)
        memcpy(own, bf16, columns * sizeof *own);
    else
        for (size_t c = 0; c < columns; c++) own[c] = kt_bf16_from_f32(f32[c]);
    for (size_t c = 0; r && c < columns; c++) own[c] = kt_bf16_from_f32(kt_bf16_to_f32(own[c]) * *r);
    memset(own + columns, 0, (from->k - columns) * sizeof *own);
    if (from->rule) kt_blocks_round(from->rule, own, from->k);
    return own;
}

static kt_given_rows given_rows(const kt_x *x) {
    const size_t hidden = x->layer->hidden;
    return (kt_given_rows){x->batch->x, x->batch->dtype, hidden, hidden, x->k, x->batch->x_rounded ? NULL : x->layer->round_x};
}

bool kt_x_stages(const kt_x *x, const kt_x_form *form) {
    const kt_route *r = x->route;
    const kt_layer *l = x->layer;
    const kt_given_rows from = given_rows(x);
    const bool as_it_is = !form->rows->encode && kt_given_as_it_is(&from) && l->router_weight != KT_EXPERT_INPUT;
    /* A row alone is a tile, too. */
    return !as_it_is || (form->rows->tiled ? r->num_slots > r->num_pieces : x->batch->tokens >= KT_STAGE_TOKENS);
}

void kt_x_point(const kt_x *x, kt_x_form *form) {
    const kt_route *r = x->route;
    for (const kt_piece *e = r->pieces; e < r->pieces + r->num_pieces; e++)
        for (size_t slot = e->first, i = 0; i < e->count; slot++, i++) {
            if (!form->stage)
                form->x[slot] = (const uint16_t *)x->batch->x + r->slot_token[slot] * x->layer->hidden;
            else if (form->by_slot)
                form->x[slot] = kt_row_of(form->rows, form->staged, form->stride_bytes, e, i);
            else
                form->x[slot] = form->staged + r->slot_token[slot] * form->stride_bytes;
        }
}

const uint16_t *kt_x_row(const kt_x *x, size_t token, float r, uint16_t *own) {
    const kt_given_rows from = given_rows(x);
    return kt_given_row(&from, token, x->layer->router_weight == KT_EXPERT_INPUT ? &r : NULL, own);
}

/* A row of x as kernels take it. */
static void stage_row(const kt_x *x, const kt_x_form *form, size_t row, uint16_t *own) {
    const bool e2m1 = x->layer->round_x && x->layer->round_x->e2m1;
    const size_t token = form->by_slot ? x->route->slot_token[row] : row;
    const uint16_t *bf16 = kt_x_row(x, token, form->by_slot ? x->route->slot_weight[row] : 1.0f, own);
    if (form->by_slot)
        kt_row_put(form->rows, e2m1, bf16, 0, x->k, x->k, x->together[row], (void *)form->x[row]);
    else
        kt_row_put(form->rows, e2m1, bf16, 0, x->k, x->k, 1, form->staged + row * form->stride_bytes);
}

size_t kt_x_rows(const kt_x *x, const kt_x_form *form) {
    if (!form->stage) return 0;
    return form->by_slot ? x->route->num_slots : x->batch->tokens;
}

void kt_x_stage(const kt_x *x, const kt_x_form *form, size_t first, size_t end, uint16_t *row) {
    for (size_t i = first; i < end; i++) stage_row(x, form, i, row);
}
