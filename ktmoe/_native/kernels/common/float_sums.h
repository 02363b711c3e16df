/* What kernels whose sums are fp32 from the start give to panel.h. */
#ifndef KT_FLOAT_SUMS_H
#define KT_FLOAT_SUMS_H

#include "kernels/common/scales.h"
#include "kernels/common/x_sums.h"

typedef f32v sums;

INLINE sums start(const void *x, const size_t k, const size_t block, const int span, const void *t, const scaling how) {
    return (void)x, (void)k, (void)block, (void)span, (void)t, (void)how, splat(0);
}

INLINE f32v factor(const void *x, const size_t k, const size_t block, const void *t) {
    return (void)x, (void)k, (void)block, (void)t, splat(1);
}

/* What stands behind a row's numbers. */
INLINE f32v sum_of_x(const void *behind, const size_t block, const int span) {
    return splat(((const x_sums *)behind)[block].of[span]);
}

INLINE f32v finish(const sums sum, const f32v scale, const f32v of_x, const f32v out) {
    return (void)of_x, scale_and_add(sum, scale, out);
}

#endif
