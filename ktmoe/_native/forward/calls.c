/* Calls of kernels: which of a kernel's functions, for how many rows, and what a matrix has besides its packed weights. */
#include "forward/calls.h"

#include "base/numbers.h"
#include "forward/tuning.h"

void kt_multiply(const kt_dot *dot, const kt_kernel *kernel) {
    (!kt_moe_tuning.only_many && dot->m <= kernel->few_max ? kernel->few : kernel->many)(dot);
}

/* Equal calls of at most KT_ROWS_MAX, all of whole tiles but for the last. */
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
