/* What rows of integers get their scales from. Includers have AVX2. */
#ifndef KT_MAGNITUDE_H
#define KT_MAGNITUDE_H

#include <immintrin.h>
#include <stdint.h>

/* The bits of the largest of 32 bf16, without its sign. */
static inline uint32_t largest_magnitude(const uint16_t *x) {
    const __m256i magnitude = _mm256_set1_epi16(0x7FFF);
    const __m256i a = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)x), magnitude);
    const __m256i b = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(x + 16)), magnitude);
    const __m256i both = _mm256_max_epu16(a, b);
    const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    /* The least of the complements, since only that has an instruction. */
    return 0xFFFF - (uint32_t)_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1))), 0);
}

/* 2^n, n from -126 to 127. */
static inline float power_of_two(int n) {
    const uint32_t bits = (uint32_t)(n + 127) << 23;
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

#endif
