/* Calls of kernels: which of a kernel's functions, for how many rows, and what a matrix has besides its packed weights. */
#include "forward/calls.h"

#include "base/numbers.h"
#include "forward/tuning.h"

void kt_multiply(const kt_dot *dot, const kt_kernel *kernel) {
    (!kt_moe_tuning.only_many && dot->m <= kernel->few_max ? kernel->few : kernel->many)(dot);
}

/* The rows of the next call: calls are equal, of at most KT_ROWS_MAX rows, and all of whole tiles but for the last. */
size_t kt_call_rows(size_t left) {
    const size_t calls = (left + KT_ROWS_MAX - 1) / KT_ROWS_MAX;
    return calls == 1 ? left : kt_round_up((left + calls - 1) / calls, KT_TILE_ROWS);
}

kt_finish kt_finish_of(const kt_matrix *w, size_t panel) {
    return (kt_finish){
        .factor = w->factor ? w->factor + panel * w->factor_step : NULL,
        .divides = w->divides,
        .bias = w->bias ? w->bias + panel * KT_PANEL : NULL,
    };
}

/* Finishes a panel's columns. It is compiled for any CPU, and no compiler option lets it contract a product and a sum. */
void kt_finish_rows(kt_panel_row *d, size_t m, const kt_finish *f) {
    for (size_t i = 0; i < m; i++) {
        float *restrict row = d[i];
        for (size_t c = 0; f->factor && c < KT_PANEL; c++) row[c] = f->divides ? row[c] / f->factor[c] : row[c] * f->factor[c];
        for (size_t c = 0; f->bias && c < KT_PANEL; c++) row[c] += f->bias[c];
        for (size_t c = 0; f->added && c < KT_PANEL; c++) row[c] += f->added[i * KT_PANEL + c];
    }
}

void kt_store(const float *restrict from, size_t columns, void *y, enum kt_dtype dtype, size_t at) {
    if (dtype == KT_F32) {
        memcpy((float *)y + at, from, columns * sizeof *from);
        return;
    }
    uint16_t *restrict to = (uint16_t *)y + at;
    for (size_t c = 0; c < columns; c++) to[c] = kt_bf16_from_f32(from[c]);
}
