/* Which kernels a layer uses, and so what it has to make of x and h. */
#include "layer/layer.h"

static size_t most(size_t a, size_t b) { return a > b ? a : b; }

bool kt_layer_use(kt_layer *l, kt_matrix *matrix, bool down, const kt_kernel *kernel) {
    if (down) {
        l->h_block_bytes = most(l->h_block_bytes, kernel->rows->block_bytes);
    } else {
        size_t form = 0;
        while (form < KT_X_FORMS && l->x_rows[form] && l->x_rows[form] != kernel->rows) form++;
        if (form == KT_X_FORMS) return false;
        l->x_rows[form] = kernel->rows;
        matrix->x_form = form;
    }
    matrix->kernel = kernel;
    l->kernel_scratch_bytes = most(l->kernel_scratch_bytes, kernel->scratch_bytes);
    return true;
}
