/* What kernels that multiply 8-bit x give to panel.h; see int8_rows.h. VPDPBUSD takes weights that are not negative: integers plus a
 * number, which a sum begins at minus that many times the sum of x.
 */
#include "kernels/common/int8_rows.h"
#include "kernels/common/scales.h"

enum {
    STEP_K = 4,
    DECODE_K = 256, /* a strip is 16 KiB with AVX-512, 8 KiB without; 512 was slower */
    IN_PLACE = 0,
    EIGHTS_APART = 0,
    BLOCK_SUMS = 1,
#if VECTOR_BYTES == 64
    BY_VECTOR = 0,
    HOLD_TOTALS = 1,
    HOLD_HALVES = 0,
    TILE_ROWS = 3, /* x 4 vectors = 12 sums and 12 totals of 32 registers; a broadcast of x serves a whole panel */
    TILE_VECTORS = 4,
    FEW_ROWS = 6,
    FEW_MAX = 12, /* in two passes; from there on, decoding once is faster */
#else
    BY_VECTOR = 1,
    HOLD_TOTALS = 0,
    HOLD_HALVES = 0,
    TILE_ROWS = 6, /* x 2 vectors = 12 sums of 16 registers */
    TILE_VECTORS = 2,
    FEW_ROWS = 2,
    FEW_MAX = 2,
#endif
};

#if VECTOR_BYTES == 64
#define PASSES(P) P(1, 4) P(2, 4) P(3, 4) P(4, 4) P(5, 4) P(6, 4)
#else
#define PASSES(P) P(1, 8) P(2, 4)
#endif

typedef i32v sums;

INLINE const int8_block *tail(const void *x, const size_t k, const size_t block) {
    return (const int8_block *)((const int8_t *)x + k) + block;
}

INLINE const int8_halves *tail_of_halves(const void *x, const size_t k, const size_t block) {
    return (const int8_halves *)tail(x, k, k / KT_BLOCK) + block;
}

/* -16 times the sum of x, as int8_block.start has it; span: panel.h's. */
INLINE sums minus_16_sums(const void *x, const size_t k, const size_t block, const int span) {
    float bits;
    memcpy(&bits, span ? &tail_of_halves(x, k, block)->start[span - 1] : &tail(x, k, block)->start, sizeof bits);
    return (sums)splat(bits);
}

/* The sum of x's integers; span: panel.h's. */
INLINE int32_t integer_sum(const void *x, const size_t k, const size_t block, const int span) {
    const int32_t start = span ? tail_of_halves(x, k, block)->start[span - 1] : tail(x, k, block)->start;
    return (SUMS_OF_WORDS ? (int16_t)(start & 0xFFFF) + (start >> 16) : start) / -16;
}

/* -zero times that. */
INLINE sums minus_sums(const void *x, const size_t k, const size_t block, const int span, const int32_t zero) {
    const u32v none = {0};
    return (sums)(none + (uint32_t)(-zero * integer_sum(x, k, block, span)));
}

/* The sum of x, which is exact; span: panel.h's. */
INLINE f32v x_sum(const void *x, const size_t k, const size_t block, const int span) {
    return splat(tail(x, k, block)->scale * (float)integer_sum(x, k, block, span));
}

#if defined __AVX512VNNI__
INLINE sums dot_bytes(const sums sum, const u32v w, const u32v x) {
    return (sums)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
}
#elif defined __AVXVNNI__
INLINE sums dot_bytes(const sums sum, const u32v w, const u32v x) {
    return (sums)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
}
#else
/* Words of two products each: neither w nor -w may make them more than 16 bits. */
INLINE __m256i products(const u32v w, const u32v x) { return _mm256_maddubs_epi16((__m256i)w, (__m256i)x); }
/* The sums of neighbouring words. */
INLINE i32v add_words(const __m256i words) { return (i32v)_mm256_madd_epi16(words, _mm256_set1_epi16(1)); }
#endif
