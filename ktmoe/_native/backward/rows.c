/* Rows of x and of the gradient of y, as numbers. */
#include "backward/rows.h"

#include <string.h>

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
