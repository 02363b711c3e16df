/* Form int8: rows of 8-bit integers with a bf16 number as scale per 32 k. Includers have AVX2.
 *
 * LAYOUT      of a row of k: k int8, of each 8 in the order 0 4 1 5 2 6 3 7, then k / 32 int8_block, then k / 32 int8_halves
 * DEFINITION  of 32 bf16 x: M = max(largest magnitude, 127 * 2^-118), scale = M / 127 rounded to bf16, q = x / scale rounded to
 *             an integer, both to nearest, ties to even: |q| <= 127. A NaN or an infinity makes scale NaN.
 *
 *             Of 32 E2M1 numbers times a power of two: E = max(exponent of M, -126), scale = 2^(E - 3), q = x / scale, an integer:
 *             the least of E2M1's sizes is 2^-3 of its largest power of two.
 *
 * A quotient in fp32 is rounded twice and yet right: a number of 8 bits over one of 8 bits is half an integer, or further from
 * one than 2^-11, and over 127 it is never half a unit of bf16.
 */
#ifndef KT_INT8_ROWS_H
#define KT_INT8_ROWS_H

#include <immintrin.h>
#include <string.h>

#include "kernels/common/magnitude.h"
#include "ktmoe.h"

/* Sums are kept in words where there is no VPDPBUSD. Rows and kernels have to agree on that. */
#if defined __AVX512VNNI__ || defined __AVXVNNI__
#define SUMS_OF_WORDS 0
#else
#define SUMS_OF_WORDS 1
#endif

/* What a row of int8 has for each 32 k behind its integers. start: minus 16 times the sum of the 32 integers; or, in words, that of
 * those with even k and of those with odd k. */
typedef struct int8_block {
    float scale;
    int32_t start;
} int8_block;

/* The starts of the first and of the last 16 k of each 32. They stand apart: the common case has shorter addresses then. */
typedef struct int8_halves {
    int32_t start[2];
} int8_halves;

enum { LEAST_INT8_MAXIMUM = 15 << 7 | 126 }; /* bf16 bits of 127 * 2^-118: scale * unit is a normal number */

static inline float int8_scale(uint32_t largest) {
    uint32_t bits = (largest > LEAST_INT8_MAXIMUM ? largest : LEAST_INT8_MAXIMUM) << 16;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    scale /= 127;
    memcpy(&bits, &scale, sizeof bits);
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000;
    memcpy(&scale, &bits, sizeof scale);
    return scale;
}

/* 8 bf16 as fp32. */
static inline __m256 widened(const uint16_t *x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x)), 16));
}

/* 32 integers in the row's order: a lane of packed has the first four of each eight, the other the last four. */
static inline __m256i in_order(const __m256i v[4]) {
    const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    const __m128i first = _mm256_castsi256_si128(packed), last = _mm256_extracti128_si256(packed, 1);
    return _mm256_set_m128i(_mm_unpackhi_epi8(first, last), _mm_unpacklo_epi8(first, last));
}

static inline __m256i int8_integers(const uint16_t *x, const float scale) {
    __m256i v[4];
    for (int i = 0; i < 4; i++) v[i] = _mm256_cvtps_epi32(_mm256_div_ps(widened(x + 8 * i), _mm256_set1_ps(scale)));
    return in_order(v);
}

/* The scale is 2^-up: 2^-129 is beyond the normal range, two factors each. */
static inline __m256i e2m1_integers(const uint16_t *x, const int up, float *scale) {
    const int half = up >> 1;
    const float factor1 = power_of_two(half), factor2 = power_of_two(up - half);
    __m256i v[4];
    for (int i = 0; i < 4; i++) {
        const __m256 scaled = _mm256_mul_ps(widened(x + 8 * i), _mm256_set1_ps(factor1));
        v[i] = _mm256_cvtps_epi32(_mm256_mul_ps(scaled, _mm256_set1_ps(factor2)));
    }
    *scale = power_of_two(-half) * power_of_two(half - up);
    return in_order(v);
}

/* A start from its two words, of even and of odd k. */
static inline int32_t int8_start(const __m128i words) {
    const uint32_t both = (uint32_t)_mm_cvtsi128_si32(words);
    return SUMS_OF_WORDS ? (int32_t)both : (int16_t)(both & 0xFFFF) + (int16_t)(both >> 16);
}

/* Writes the starts of 32 integers, which are in the row's order. */
static inline void int8_starts(const __m256i integers, int8_block *block, int8_halves *halves) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(16), integers);
    __m256i sums = _mm256_sub_epi16(_mm256_setzero_si256(), pairs);
    sums = _mm256_add_epi16(sums, _mm256_srli_si256(sums, 8));
    sums = _mm256_add_epi16(sums, _mm256_srli_si256(sums, 4));
    const __m128i first = _mm256_castsi256_si128(sums), last = _mm256_extracti128_si256(sums, 1);
    block->start = int8_start(_mm_add_epi16(first, last));
    *halves = (int8_halves){{int8_start(first), int8_start(last)}};
}

static inline __attribute__((always_inline)) void encode_blocks(const uint16_t *restrict x, size_t first, size_t count,
                                                                size_t k, void *restrict row, const int e2m1) {
    int8_t *restrict q = (int8_t *)row + first;
    int8_block *restrict block = (int8_block *)((int8_t *)row + k) + first / KT_BLOCK;
    int8_halves *restrict halves = (int8_halves *)((int8_block *)((int8_t *)row + k) + k / KT_BLOCK) + first / KT_BLOCK;
    for (size_t i = 0; i < count; i += KT_BLOCK, x += KT_BLOCK, q += KT_BLOCK, block++, halves++) {
        const uint32_t largest = largest_magnitude(x), field = largest >> 7;
        if (field == 0xFF) {
            *block = (int8_block){__builtin_nanf(""), 0};
            *halves = (int8_halves){{0}};
            memset(q, 0, KT_BLOCK);
            continue;
        }
        if (!e2m1) block->scale = int8_scale(largest);
        const __m256i integers =
            e2m1 ? e2m1_integers(x, 3 + 127 - (field ? (int)field : 1), &block->scale) : int8_integers(x, block->scale);
        _mm256_storeu_si256((__m256i *)q, integers);
        int8_starts(integers, block, halves);
    }
}

static inline void encode_int8(const uint16_t *restrict x, size_t first, size_t count, size_t k, void *restrict row) {
    encode_blocks(x, first, count, k, row, 0);
}

static inline void encode_int8_e2m1(const uint16_t *restrict x, size_t first, size_t count, size_t k, void *restrict row) {
    encode_blocks(x, first, count, k, row, 1);
}

#endif
