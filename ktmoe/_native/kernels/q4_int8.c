/* q4 with 8-bit x: codes stand for small integers; see int8.h and panel.h.
 *
 * DEFINITION  for each 32 k, or 16 where these have a scale: sum of whole * q, exact: of (whole + 16) * q, bytes that are not
 *             negative, begun at -16 * sum of q; whole is whole[code], or code - zero point: of size 16 at most;
 *             out = fma(sum * (scale of x * unit), scale, out): sum has 16 bits and the scale of x has 8, so that both products
 *             are exact but for fp32's range
 * LAYOUT      pack/layout.h. The low nibbles of a dword's bytes are k0 k4 k1 k5, the high ones k2 k6 k3 k7, and so are those of x.
 * REGULARITIES VPDPBUSD adds four products to a sum of 32 bits. VPMADDUBSW and VPADDW sum even and odd k in words of 16 k: of a
 *             sum begun at -16 * sum of q, what is added counts whole * q and what is not -16 * q, each at most 16 * 127, so
 *             that it is always within +-32512, of 16 k within half of that. Two products, at most 2 * 32 * 127, never saturate.
 */
#include "kernels/common/int8.h"
#include "kernels/common/isa.h"
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

INLINE table load_table(const kt_codebook *book, const scaling how) {
    (void)how;
    u8v whole;
    for (int i = 0; i < VECTOR_BYTES; i++) whole[i] = (uint8_t)book->whole[i % 16];
    return (table){(u32v)(whole + 16), book->unit};
}

/* What is added to codes with zero points: a value is its code, and becomes code - z + 16. */
typedef u32v fold;

INLINE u32v fold_columns(const uint8_t *header, const int v, const scaling how) {
    return (16 - load_zero_points(header, v, how)) * 0x01010101;
}
INLINE fold fold_of(const u32v columns, const scaling how) { return (void)how, columns; }

INLINE u32v decode(const place *p, const int v, const int step, const scaling how, const table *t, const fold *f) {
    const u32v codes = load_u32(codes_at(p, v)), nibbles = (step ? codes >> 4 : codes) & 0x0F0F0F0F;
    return how & ZERO_POINTS ? nibbles + *f : lookup(t->whole, nibbles);
}

INLINE sums start(const void *x, const size_t k, const size_t block, const int span) {
    return minus_16_sums(x, k, block, span);
}

INLINE sums dot(const sums sum, const u32v w, const u32v x) {
#if SUMS_OF_WORDS
    return (sums)_mm256_add_epi16((__m256i)sum, products(w, x));
#else
    return dot_bytes(sum, w, x);
#endif
}

INLINE i32v whole_sum(const sums sum) {
#if SUMS_OF_WORDS
    return add_words((__m256i)sum);
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

#include "kernels/loops/panel.h"

#define Q4_ROWS rows_int8
#define Q4_ROWS_SUMS rows_int8
#include "kernels/common/q4_ways.h"

const kt_kernel KT_NAME(q4_int8)[] = {
    Q4_WAYS,
    {0},
};
