/* What kernels that multiply 16-bit x with VPMADDWD or VPDPWSSD give to panel.h; see int16_rows.h. Weights are words that are not
 * negative, 0 and more: integers plus a number, which a sum begins at minus that many times the sum of x.
 */
#include "kernels/common/int16_rows.h"
#include "kernels/common/scales.h"

enum {
    STEP_K = 2,
    DECODE_K = 256, /* a strip is 16 KiB */
    IN_PLACE = 0,
    EIGHTS_APART = 0,
    BY_VECTOR = 1,
    HOLD_TOTALS = 0,
    HOLD_HALVES = 0,
    BLOCK_SUMS = 1,
    TILE_ROWS = 6, /* x 2 vectors = 12 accumulators of 16 */
    TILE_VECTORS = 2,
    FEW_ROWS = 2, /* from 3 on, decoding once is faster */
    FEW_MAX = FEW_ROWS,
};

#define PASSES(P) P(1, 8) P(2, 4)

typedef i32v sums;

INLINE const int16_block *tail(const void *x, const size_t k, const size_t block) {
    return (const int16_block *)((const int16_t *)x + k) + block;
}

INLINE const int16_halves *tail_of_halves(const void *x, const size_t k, const size_t block) {
    return (const int16_halves *)tail(x, k, k / KT_BLOCK) + block;
}

/* -16 times the sum of x, as sums begin with it; span: panel.h's. */
INLINE sums minus_16_sums(const void *x, const size_t k, const size_t block, const int span) {
    const int32_t *sum = span ? &tail_of_halves(x, k, block)->minus_16_sums[span - 1] : &tail(x, k, block)->minus_16_sums;
    return (sums)_mm256_set1_epi32(*sum);
}

/* The sum of x's integers; span: panel.h's. */
INLINE int32_t integer_sum(const void *x, const size_t k, const size_t block, const int span) {
    return (span ? tail_of_halves(x, k, block)->minus_16_sums[span - 1] : tail(x, k, block)->minus_16_sums) / -16;
}

/* -zero times that. */
INLINE sums minus_sums(const void *x, const size_t k, const size_t block, const int span, const int32_t zero) {
    return (sums)_mm256_set1_epi32(-zero * integer_sum(x, k, block, span));
}

/* The sum of x, which is exact; span: panel.h's. */
INLINE f32v x_sum(const void *x, const size_t k, const size_t block, const int span) {
    return splat(tail(x, k, block)->scale * (float)integer_sum(x, k, block, span));
}

/* The lower or the upper bytes of words, as words. */
INLINE u32v bytes_of_words(const u32v v, const int upper) {
    return (u32v)(upper ? _mm256_srli_epi16((__m256i)v, 8) : _mm256_and_si256((__m256i)v, _mm256_set1_epi16(0xFF)));
}

INLINE sums dot(const sums sum, const u32v w, const u32v x, const scaling how) {
    (void)how;
#if defined __AVXVNNI__
    return (sums)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#else
    return sum + (i32v)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#endif
}

INLINE f32v finish(const sums sum, const f32v scale, const f32v of_x, const f32v out) {
    return multiply_add(__builtin_convertvector(sum, f32v) * of_x, scale, out);
}
