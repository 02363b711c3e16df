/* q4 as fp32 numbers, as panel.h's decode() gives them. */
#ifndef KT_Q4_VALUES_H
#define KT_Q4_VALUES_H

#include "kernels/common/q4_layout.h"

INLINE int nibble_bit(const int k) { return k / 2 * 4 + k % 2 * 16; }

#if VECTOR_BYTES == 64
typedef __m512 table;

INLINE table load_table(const kt_codebook *book, const scaling how) { return (void)how, _mm512_loadu_ps(book->value); }

/* VPERMPS reads four index bits, so that what stands above the nibble does not matter. */
INLINE f32v lookup(const u32v codes, const int bit, const table *t) {
    return (f32v)_mm512_permutexvar_ps((__m512i)(codes >> bit), *t);
}
#elif VECTOR_BYTES == 32
/* The lower and the upper bytes of bf16 values. */
typedef struct table {
    __m256i low, high;
} table;

INLINE table load_table(const kt_codebook *book, const scaling how) {
    (void)how;
    const __m256i values = _mm256_loadu_si256((const __m256i *)book->plain);
    const __m256i low = _mm256_and_si256(values, _mm256_set1_epi16(0xFF)), high = _mm256_srli_epi16(values, 8);
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(low, high), 0xD8);
    return (table){_mm256_permute4x64_epi64(bytes, 0x44), _mm256_permute4x64_epi64(bytes, 0xEE)};
}

/* Two VPSHUFB look up the bytes of half of a vector's 8 k; of these, two bf16 of k and k + 1 are joined in each dword. It takes 27
 * instructions for 8 k, where a table of fp32, in two registers, took 38. */
INLINE f32v lookup(const u32v codes, const int bit, const table *t) {
    const __m256i nibbles = (__m256i)((bit & 4 ? codes >> 4 : codes) & 0x0F0F0F0F);
    const __m256i low = _mm256_shuffle_epi8(t->low, nibbles), high = _mm256_shuffle_epi8(t->high, nibbles);
    const u32v pair = bit & 8 ? (u32v)_mm256_srli_epi16(low, 8) | ((u32v)high & 0xFF00FF00)
                              : ((u32v)low & 0x00FF00FF) | (u32v)_mm256_slli_epi16(high, 8);
    return (f32v)(bit & 16 ? pair & 0xFFFF0000 : pair << 16);
}
#else
typedef const float *table;

INLINE table load_table(const kt_codebook *book, const scaling how) { return (void)how, book->value; }

INLINE f32v lookup(const u32v codes, const int bit, const table *t) {
    f32v v;
    for (int l = 0; l < LANES; l++) v[l] = (*t)[codes[l] >> bit & 15];
    return v;
}
#endif

/* What zero points subtract. With them a value is its code. A nibble at bit b of the float 2^(23 - b) adds the code itself to
 * it; a fold has 2^(23 - b) + z for each of four such bits, so that their difference is exact, and a dword of codes is shifted
 * but once. */
typedef struct fold {
    f32v offset[4]; /* of nibbles at bits 0, 4, 8, 12 */
} fold;

INLINE u32v at_bit(const u32v codes, const int bit) {
    return replace_bits(codes, 15u << bit, (uint32_t)(127 + 23 - bit) << 23);
}

INLINE u32v fold_columns(const uint8_t *header, const int v, const scaling how) { return load_zero_points(header, v, how); }

INLINE fold fold_of(const u32v z, const scaling how) {
    (void)how;
    fold f;
    for (int i = 0; i < 4; i++) f.offset[i] = (f32v)at_bit(z << 4 * i, 4 * i);
    return f;
}

INLINE u32v decode(const place *p, const int v, const int k, const scaling how, const table *t, const fold *f) {
    const u32v codes = load_u32(codes_at(p, v));
    const int half = nibble_bit(k) & 16, bit = nibble_bit(k) & 15;
    if (how & ZERO_POINTS) return (u32v)((f32v)at_bit(codes >> half, bit) - f->offset[bit / 4]);
    return (u32v)lookup(codes, nibble_bit(k), t);
}

#endif
