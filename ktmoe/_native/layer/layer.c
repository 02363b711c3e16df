/* The choice of a layer's kernels, and so the forms that x and h need. */
#include "layer/layer.h"

static size_t most(size_t a, size_t b) { return a > b ? a : b; }

bool kt_layer_use(kt_layer *l, kt_matrix *matrix, bool down, const kt_kernel *kernel) {
    if (down) {
        l->h_block_bytes = most(l->h_block_bytes, kernel->rows->block_bytes);
    } else {
        size_t i = 0;
        while (i < KT_X_FORMS && l->x_rows[i] && l->x_rows[i] != kernel->rows) i++;
        if (i == KT_X_FORMS) return false;
        l->x_rows[i] = kernel->rows;
        matrix->x_form = i;
    }
    matrix->kernel = kernel;
    l->kernel_scratch_bytes = most(l->kernel_scratch_bytes, kernel->scratch_bytes);
    return true;
}
