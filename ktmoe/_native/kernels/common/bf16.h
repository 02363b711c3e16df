/* What kernels that multiply with VDPBF16PS give to panel.h: a dword of x is two bf16, and dot() is, rounding after each step
 * and flushing denormals: sum = x[k+1] * w[k+1] + sum; sum = x[k] * w[k] + sum.
 */
#include "kernels/common/float_sums.h"

enum {
    STEP_K = 2,
    DECODE_K = 256, /* a strip is 32 KiB */
    BY_VECTOR = 0,
    HOLD_TOTALS = 0,
    HOLD_HALVES = 1,
    BLOCK_SUMS = 0,
    TILE_VECTORS = 4,
    TILE_ROWS = 6, /* 24 accumulators of 32 registers */
};

/* The passes have 4 to 24 chains, which hide the latency and fit into registers. A broadcast of x serves all vectors, and 6
 * rows decode once. A kernel file says what FEW_ROWS, FEW_MAX and EIGHTS_APART are. FEW_ROWS 12: a pass of more
 * than 6 rows goes over the codes twice, half of the columns at a time. 6: more rows are passes of their own, which decode the same
 * codes again. */
#define PASSES(P) P(1, 4) P(2, 4) P(3, 4) P(4, 4) P(5, 4) P(6, 4) P(7, 2) P(8, 2) P(9, 2) P(10, 2) P(11, 2) P(12, 2)

INLINE f32v x_sum(const void *x, const size_t k, const size_t block, const int span) {
    return sum_of_x((const uint16_t *)x + k, block, span);
}

INLINE sums dot(const sums sum, const u32v w, const u32v x, const scaling how) {
    return (void)how, (sums)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
}
