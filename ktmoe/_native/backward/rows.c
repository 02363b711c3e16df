/* Rows of x and of the gradient of y as they enter gate, up and down, forward or backward. */
#include "backward/rows.h"

#include <string.h>

const kt_kernel *kt_product_of(const kt_back_job *j, const kt_matrix *matrix) {
    return j->products[strcmp(matrix->kernel->operand, "f32") == 0];
}

size_t kt_together(const kt_piece *piece, size_t i) {
    const size_t left = piece->count - i / KT_TILE_ROWS * KT_TILE_ROWS;
    return left < KT_TILE_ROWS ? left : KT_TILE_ROWS;
}

float kt_weight_of(const kt_back_job *j, size_t slot) { return j->route.slot_weight[j->first + slot]; }

float kt_output_weight_of(const kt_back_job *j, size_t slot) {
    return j->layer->router_weight == KT_DOWN_OUTPUT ? kt_weight_of(j, slot) : 1.0f;
}

/* Widens count numbers from number `at` on: bf16, or fp32 numbers that are rounded to bf16. */
static void widen(const kt_back_job *j, const void *from, enum kt_dtype dtype, size_t at, size_t count, float *restrict to) {
    if (dtype == KT_BF16) {
        j->layer->isa->widen((const uint16_t *)from + at, to, count);
        return;
    }
    const float *restrict f32 = (const float *)from + at;
    for (size_t c = 0; c < count; c++) to[c] = kt_bf16_to_f32(kt_bf16_from_f32(f32[c]));
}

void kt_x_wide(const kt_back_job *j, size_t token, size_t first, size_t count, float *to) {
    widen(j, j->to.batch.x, j->to.batch.dtype, token * j->layer->hidden + first, count, to);
}

void kt_expert_x_wide(const kt_back_job *j, size_t slot, size_t first, size_t count, float *restrict to) {
    const float r = kt_weight_of(j, slot);
    kt_x_wide(j, j->route.slot_token[j->first + slot], first, count, to);
    if (j->layer->router_weight != KT_EXPERT_INPUT) return;
    for (size_t c = 0; c < count; c++) to[c] = kt_bf16_to_f32(kt_bf16_from_f32(to[c] * r));
}

void kt_dy_wide(const kt_back_job *j, size_t slot, size_t first, size_t count, float *to) {
    const size_t at = j->route.slot_token[j->first + slot] * j->layer->hidden + first;
    widen(j, j->to.grad_y, j->to.grad_dtype, at, count, to);
}

void kt_dy_row(const kt_back_job *j, size_t slot, uint16_t *restrict row) {
    const size_t hidden = j->layer->hidden, at = j->route.slot_token[j->first + slot] * hidden;
    memset(row + hidden, 0, (j->dy.k - hidden) * sizeof *row);
    if (j->to.grad_dtype == KT_BF16) {
        memcpy(row, (const uint16_t *)j->to.grad_y + at, hidden * sizeof *row);
        return;
    }
    const float *restrict f32 = (const float *)j->to.grad_y + at;
    for (size_t c = 0; c < hidden; c++) row[c] = kt_bf16_from_f32(f32[c]);
}

void kt_product_put(const kt_back_job *j, const kt_matrix *matrix, const kt_product_rows *rows, const kt_piece *piece, size_t i,
                    size_t first, size_t count, uint16_t *row) {
    const kt_rows *as = kt_product_of(j, matrix)->rows;
    for (size_t c = 0; matrix->factor && c < count; c += KT_PANEL) {
        const float *factor = matrix->factor + (first + c) / KT_PANEL * matrix->factor_step;
        for (size_t n = 0; n < KT_PANEL; n++) {
            const float v = kt_bf16_to_f32(row[c + n]);
            row[c + n] = kt_bf16_from_f32(matrix->divides ? v / factor[n] : v * factor[n]);
        }
    }
    kt_row_put(as, false, row, first, count, rows->k, kt_together(piece, i),
               kt_row_of(as, rows->base, rows->stride_bytes, piece, i));
}
