/* Form int16: rows of 16-bit integers with a power of two as scale per 32 k. Includers have AVX2.
 *
 * LAYOUT      of a row of k: k int16, then k / 32 int16_block, then k / 32 int16_halves
 * DEFINITION  of 32 bf16 x: E = max(exponent of their largest magnitude, -126), scale = 2^(E - 14), q = x / scale, rounded to
 *             nearest, ties to even: 2^14 <= |largest q| <= 32640 unless it is denormal. A NaN or an infinity makes scale NaN.
 */
#ifndef KT_INT16_ROWS_H
#define KT_INT16_ROWS_H

#include "kernels/common/magnitude.h"
#include "ktmoe.h"

/* What a row of int16 has for each 32 k behind its integers. */
typedef struct int16_block {
    float scale;
    int32_t minus_16_sums; /* -16 times the sum of the 32 integers */
} int16_block;

/* What a row has of the first and of the last 16 k of each 32. It stands apart: the common case has shorter addresses then. */
typedef struct int16_halves {
    int32_t minus_16_sums[2];
} int16_halves;

static inline void encode_int16(const uint16_t *restrict x, size_t first, size_t count, size_t k, void *restrict row) {
    int16_t *restrict q = (int16_t *)row + first;
    int16_block *restrict block = (int16_block *)((int16_t *)row + k) + first / KT_BLOCK;
    int16_halves *restrict halves = (int16_halves *)((int16_block *)((int16_t *)row + k) + k / KT_BLOCK) + first / KT_BLOCK;
    for (size_t i = 0; i < count; i += KT_BLOCK, x += KT_BLOCK, q += KT_BLOCK, block++, halves++) {
        const uint32_t field = largest_magnitude(x) >> 7;
        if (field == 0xFF) {
            *block = (int16_block){__builtin_nanf(""), 0};
            *halves = (int16_halves){{0}};
            __builtin_memset(q, 0, KT_BLOCK * sizeof *q);
            continue;
        }
        const int exponent = (field ? (int)field : 1) - 127, up = 14 - exponent, half = up >> 1;
        /* 2^-147 and 2^140 are beyond the normal range: two factors each. Scaling is exact where q is not rounded to 0. */
        const __m256 factor1 = _mm256_set1_ps(power_of_two(half)), factor2 = _mm256_set1_ps(power_of_two(up - half));
        __m256i sums[2];
        for (int j = 0; j < KT_BLOCK; j += 16) {
            __m256i v[2];
            for (int h = 0; h < 2; h++) {
                const __m128i words = _mm_loadu_si128((const __m128i *)(x + j + 8 * h));
                const __m256 values = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
                v[h] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_mul_ps(values, factor1), factor2));
            }
            const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(v[0], v[1]), 0xD8);
            _mm256_storeu_si256((__m256i *)(q + j), packed);
            sums[j / 16] = _mm256_add_epi32(v[0], v[1]);
        }
        const __m256i fours = _mm256_hadd_epi32(sums[0], sums[1]), both = _mm256_hadd_epi32(fours, fours);
        const __m128i of_halves = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
        const int32_t of_first = _mm_extract_epi32(of_halves, 0), of_last = _mm_extract_epi32(of_halves, 1);
        *block = (int16_block){power_of_two(-half) * power_of_two(half - up), -16 * (of_first + of_last)};
        *halves = (int16_halves){{-16 * of_first, -16 * of_last}};
    }
}

#endif
