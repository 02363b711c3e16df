/* q4 as bytes, four k of a column in a dword, as panel.h's decode() gives them, and the sums of them. Includers define WHOLE_MAX, the
 * largest size of an integer that a code stands for: 16 or 127. */
#ifndef KT_Q4_INT8_H
#define KT_Q4_INT8_H

#include "kernels/common/int8.h"
#include "kernels/common/q4_layout.h"

typedef uint8_t u8v __attribute__((vector_size(VECTOR_BYTES)));
typedef struct table {
    u32v whole;
    float unit;
} table;

INLINE u32v lookup(const u32v table, const u32v index) {
#if VECTOR_BYTES == 64
    return (u32v)_mm512_shuffle_epi8((__m512i)table, (__m512i)index);
#else
    return (u32v)_mm256_shuffle_epi8((__m256i)table, (__m256i)index);
#endif
}

/* SIGNED: weights are bytes with a sign, since VPMADDUBSW would saturate. BIAS: what is added to integers else, so that none is
 * negative. */
enum { SIGNED = SUMS_OF_WORDS && WHOLE_MAX > 16, BIAS = SIGNED ? 0 : WHOLE_MAX == 16 ? 16 : 128 };

INLINE table load_table(const kt_codebook *book, const scaling how) {
    (void)how;
    u8v whole;
    for (int i = 0; i < VECTOR_BYTES; i++) whole[i] = (uint8_t)book->whole[i % 16];
    return (table){(u32v)(whole + (uint8_t)BIAS), book->unit};
}

/* What is added to codes with zero points: a value is its code, and becomes code - z + BIAS. */
typedef u32v fold;

INLINE u32v fold_columns(const uint8_t *header, const int v, const scaling how) {
    return (BIAS - load_zero_points(header, v, how)) * 0x01010101;
}
INLINE fold fold_of(const u32v columns, const scaling how) { return (void)how, columns; }

INLINE u32v decode(const place *p, const int v, const int step, const scaling how, const table *t, const fold *f) {
    const u32v codes = load_u32(codes_at(p, v)), nibbles = (step ? codes >> 4 : codes) & 0x0F0F0F0F;
    return how & ZERO_POINTS ? nibbles + *f : lookup(t->whole, nibbles);
}

INLINE sums start(const void *x, const size_t k, const size_t block, const int span, const table *t, const scaling how) {
    (void)t, (void)how;
    if (SIGNED) return (sums)splat(0);
    return BIAS == 16 ? minus_16_sums(x, k, block, span) : minus_sums(x, k, block, span, BIAS);
}

INLINE sums dot(const sums sum, const u32v w, const u32v x, const scaling how) {
    (void)how;
#if SUMS_OF_WORDS
    if (!SIGNED) return (sums)_mm256_add_epi16((__m256i)sum, products(w, x));
    const u32v size = (u32v)_mm256_abs_epi8((__m256i)w), with_sign = (u32v)_mm256_sign_epi8((__m256i)x, (__m256i)w);
    return sum + add_words(products(size, with_sign));
#else
    return dot_bytes(sum, w, x);
#endif
}

INLINE i32v whole_sum(const sums sum) {
#if SUMS_OF_WORDS
    return SIGNED ? sum : add_words((__m256i)sum);
#else
    return sum;
#endif
}

INLINE f32v factor(const void *x, const size_t k, const size_t block, const table *t) {
    return splat(tail(x, k, block)->scale) * t->unit;
}

INLINE f32v finish(const sums sum, const f32v scale, const f32v of_x, const f32v out) {
    return multiply_add(__builtin_convertvector(whole_sum(sum), f32v) * of_x, scale, out);
}

#endif
