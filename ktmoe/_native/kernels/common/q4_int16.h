/* q4 as words that are not negative, in k-pairs, as panel.h's decode() gives them, and the sums of them. Includers define WHOLE_MAX, the
 * largest size of an integer that a code stands for: 16 or 127. */
#ifndef KT_Q4_INT16_H
#define KT_Q4_INT16_H

#include "kernels/common/int16.h"
#include "kernels/common/q4_layout.h"

typedef struct table {
    __m256i whole;
    float unit;
} table;

/* What is added to integers, so that none is negative. */
enum { BIAS = WHOLE_MAX == 16 ? 16 : 128 };

INLINE table load_table(const kt_codebook *book, const scaling how) {
    (void)how;
    const __m256i whole = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)book->whole));
    return (table){_mm256_add_epi8(whole, _mm256_set1_epi8((char)BIAS)), book->unit};
}

/* What is added to codes with zero points: a value is its code, and becomes code - z + BIAS. */
typedef u32v fold;

INLINE u32v fold_columns(const uint8_t *header, const int v, const scaling how) {
    return (BIAS - load_zero_points(header, v, how)) * 0x01010101;
}
INLINE fold fold_of(const u32v columns, const scaling how) { return (void)how, columns; }

INLINE u32v decode(const place *p, const int v, const int pair, const scaling how, const table *t, const fold *f) {
    const u32v codes = load_u32(codes_at(p, v)), nibbles = (pair % 2 ? codes >> 4 : codes) & 0x0F0F0F0F;
    return bytes_of_words(how & ZERO_POINTS ? nibbles + *f : (u32v)_mm256_shuffle_epi8(t->whole, (__m256i)nibbles), pair >= 2);
}

INLINE sums start(const void *x, const size_t k, const size_t block, const int span, const table *t, const scaling how) {
    (void)t, (void)how;
    return BIAS == 16 ? minus_16_sums(x, k, block, span) : minus_sums(x, k, block, span, BIAS);
}

INLINE f32v factor(const void *x, const size_t k, const size_t block, const table *t) {
    return splat(tail(x, k, block)->scale) * t->unit;
}

#endif
