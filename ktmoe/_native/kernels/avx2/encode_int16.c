/* Activation mode int16: rows of 16-bit integers with a power of two as scale per 32 k.
 *
 * LAYOUT      of a row of k: k int16, then k / 32 int16_block
 * DEFINITION  of 32 bf16 x: E = max(exponent of their largest magnitude, -126), scale = 2^(E - 14), q = x / scale, rounded to
 *             nearest, ties to even: 2^14 <= |largest q| <= 32640 unless it is denormal. A NaN or an infinity makes scale NaN.
 */
#include <immintrin.h>

#include "kernels/avx2/kernels.h"

static inline float power_of_two(int n) {
    const uint32_t bits = (uint32_t)(n + 127) << 23;
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t largest_magnitude(const uint16_t *x) {
    const __m256i magnitude = _mm256_set1_epi16(0x7FFF);
    const __m256i a = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)x), magnitude);
    const __m256i b = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(x + 16)), magnitude);
    const __m256i both = _mm256_max_epu16(a, b);
    const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    /* The least of the complements, since only that has an instruction. */
    return 0xFFFF - (uint32_t)_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1))), 0);
}

void kt_encode_int16_avx2(const uint16_t *restrict x, size_t first, size_t count, size_t k, void *restrict row) {
    int16_t *restrict q = (int16_t *)row + first;
    int16_block *restrict block = (int16_block *)((int16_t *)row + k) + first / KT_GROUP;
    for (size_t i = 0; i < count; i += KT_GROUP, x += KT_GROUP, q += KT_GROUP, block++) {
        const uint32_t field = largest_magnitude(x) >> 7;
        if (field == 0xFF) {
            *block = (int16_block){__builtin_nanf(""), 0};
            __builtin_memset(q, 0, KT_GROUP * sizeof *q);
            continue;
        }
        const int exponent = (field ? (int)field : 1) - 127, up = 14 - exponent, half = up >> 1;
        /* 2^-147 and 2^140 are beyond the normal range: two factors each. Scaling is exact where q is not rounded to 0. */
        const __m256 factor1 = _mm256_set1_ps(power_of_two(half)), factor2 = _mm256_set1_ps(power_of_two(up - half));
        __m256i sums = _mm256_setzero_si256();
        for (int j = 0; j < KT_GROUP; j += 16) {
            __m256i v[2];
            for (int h = 0; h < 2; h++) {
                const __m128i words = _mm_loadu_si128((const __m128i *)(x + j + 8 * h));
                const __m256 values = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
                v[h] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_mul_ps(values, factor1), factor2));
            }
            const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(v[0], v[1]), 0xD8);
            _mm256_storeu_si256((__m256i *)(q + j), packed);
            sums = _mm256_add_epi32(sums, _mm256_add_epi32(v[0], v[1]));
        }
        int32_t sum = 0, lanes[8];
        __builtin_memcpy(lanes, &sums, sizeof lanes);
        for (int l = 0; l < 8; l++) sum += lanes[l];
        *block = (int16_block){power_of_two(-half) * power_of_two(half - up), -16 * sum};
    }
}
