/* What adapters add to gradients of a matrix's inputs: one chain over the rank for each number, which goes on from what is there. */
#include "backward/added.h"

void kt_add_adapter(const kt_back_worker *w, const kt_back_strip *strip, size_t matrix, size_t k, size_t first, size_t columns,
                    float *out) {
    const kt_back_job *j = w->job;
    const kt_adapter *adapter = kt_adapter_of(j, matrix);
    if (!adapter) return;
    const size_t at = j->pieces[strip->piece].expert * adapter->rank * k + first;
    const kt_wide a = kt_widened(j->layer->isa, &adapter->of[matrix].a, at, k, adapter->rank, columns, w->scratch->low);
    j->layer->isa->dense(&(kt_dense){
        .a = j->dt[matrix] + strip->first * adapter->rank,
        .b = a.at,
        .a_row = adapter->rank,
        .a_k = 1,
        .b_row = a.stride,
        .c = out,
        .c_row = KT_PANEL,
        .m = strip->rows,
        .n = columns,
        .k = adapter->rank,
        .add = 1,
    });
}
