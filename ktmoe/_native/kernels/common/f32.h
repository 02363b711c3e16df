/* What kernels that multiply in fp32 give to panel.h: a dword of x is a float, a product is exact (8 + 8 bits) but for fp32's
 * range, and dot() is multiply_add(), which says whether the product is rounded. A power of two that scales a group's sum, and
 * not each weight, costs a multiplication in 32 k instead of one a weight.
 */
#include "kernels/common/float_sums.h"

#ifndef VECTOR_BY_VECTOR /* BY_VECTOR: 1 where what a vector's steps share would take too many registers for all vectors */
#define VECTOR_BY_VECTOR 0
#endif

#ifndef PACKED_FLOATS /* 1: packed weights are floats, a vector a step */
#define PACKED_FLOATS 0
#endif

/* These may depend on VECTOR_BYTES and the file alone: a row of isa.py may have few() and many() of another row's object. */
enum {
    STEP_K = 1,
    DECODE_K = 128, /* a strip is 16 KiB with AVX-512; 256 was slower for up to 24 rows */
    BY_VECTOR = VECTOR_BY_VECTOR,
    EIGHTS_APART = 0,
    HOLD_TOTALS = 0,
    HOLD_HALVES = 0,
    BLOCK_SUMS = 0,
#if VECTOR_BYTES == 64
    /* 24 accumulators of 32 registers; x is an operand in memory. Packed floats are not decoded: a strip is the panel. */
    IN_PLACE = PACKED_FLOATS,
    TILE_ROWS = PACKED_FLOATS ? 6 : 12,
    TILE_VECTORS = PACKED_FLOATS ? 4 : 2,
    FEW_ROWS = 6,
#else
    IN_PLACE = 0,
    TILE_VECTORS = 2,
#if VECTOR_BYTES == 32
    TILE_ROWS = 6, /* 12 of 16 */
    FEW_ROWS = 4,
#else
    TILE_ROWS = 4, /* 8 of 16 */
    FEW_ROWS = 1,
#endif
#endif
    FEW_MAX = VECTOR_BYTES > 16 ? FEW_ROWS : 0, /* without a vector lookup, decoding once always pays */
};

#ifdef __AMX_BF16__
/* Two products by tiles beat one by FMAs: weights of up to 16 bits are the sum of two bf16 numbers. A code has 8 bits at most, or 5
 * where there are zero points; fp16 numbers have 11. */
#define SIXTEEN_BITS(how)                                                                 \
    (CODE_BITS == 16 || (CODE_BITS <= 8 && ((how) & (KINDS | MINIMA | SUPER)) == BF16) || \
     (CODE_BITS == 4 && ((how) & (KINDS | MINIMA | SUPER | ZERO_POINTS)) == (FP16 | ZERO_POINTS)))
#define OPERAND_OF(how) (SIXTEEN_BITS(how) ? AS_SPLIT : AS_FLOATS)
#endif

#if VECTOR_BYTES == 64
#define PASSES(P) P(1, 4) P(2, 4) P(3, 4) P(4, 4) P(5, 4) P(6, 4)
#elif VECTOR_BYTES == 32
#define PASSES(P) P(1, 8) P(2, 4) P(3, 2) P(4, 2)
#else
#define PASSES(P) P(1, 2)
#endif

INLINE f32v x_sum(const void *x, const size_t k, const size_t block, const int span) {
    return sum_of_x((const float *)x + k, block, span);
}

INLINE sums dot(const sums sum, const u32v w, const u32v x, const scaling how) {
    return (void)how, multiply_add((f32v)x, (f32v)w, sum);
}
