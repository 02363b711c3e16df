/* Integers with 8-bit x; see int8.h and panel.h.
 *
 * DEFINITION  for each 32 k, or 16 where these have a scale: sum of code * q, begun at minus the code of 0 times the sum of q, exact; or,
 *             without VPDPBUSD where codes may have 8 bits, of |w| * (q with w's sign);
 *             out = fma(sum, scale of x * scale, out): sum has 20 bits, and the product of both scales at most 19, so that it is exact
 *             but for fp32's range. Without scales, scale is 1. With a super-scale it has up to 27 bits, and is rounded
 * LAYOUT      pack/layout.h. The bytes of a dword are k0 k4 k1 k5 or k2 k6 k3 k7, and so are those of x.
 * REGULARITIES two products of VPMADDUBSW, at most 2 * 128 * 127, never saturate; with codes of 8 bits they would. |w| of 128 is a
 *             byte that is not negative, and no q is -128.
 */
#include "kernels/common/int8.h"
#include "kernels/common/int_layout.h"
#include "kernels/common/isa.h"
#include "kernels/common/no_fold.h"

typedef int32_t table; /* the code of 0 */

INLINE table load_table(const kt_codebook *book, const scaling how) { return (void)how, book->zero; }

/* Whether weights are bytes with a sign: where codes of 8 bits may be, and VPMADDUBSW would saturate. */
INLINE int signed_bytes(const scaling how) { return SUMS_OF_WORDS && !(how & (HALVES | MINIMA)); }

INLINE u32v decode(const place *p, const int v, const int half, const scaling how, const table *t, const fold *f) {
    (void)f;
    const u32v codes = load_codes(p, v, half, how),
               clean = bits_of_code(how) == 8 ? codes : codes & code_mask(how) * 0x01010101u;
#if SUMS_OF_WORDS
    if (signed_bytes(how)) return (u32v)_mm256_sub_epi8((__m256i)clean, _mm256_set1_epi8((char)*t));
#endif
    return (void)t, clean;
}

INLINE sums start(const void *x, const size_t k, const size_t block, const int span, const table *t, const scaling how) {
    return signed_bytes(how) ? (sums)splat(0) : minus_sums(x, k, block, span, *t);
}

INLINE sums dot(const sums sum, const u32v w, const u32v x, const scaling how) {
#if SUMS_OF_WORDS
    if (!signed_bytes(how)) return sum + add_words(products(w, x));
    const u32v size = (u32v)_mm256_abs_epi8((__m256i)w), with_sign = (u32v)_mm256_sign_epi8((__m256i)x, (__m256i)w);
    return sum + add_words(products(size, with_sign));
#else
    return (void)how, dot_bytes(sum, w, x);
#endif
}

INLINE f32v factor(const void *x, const size_t k, const size_t block, const table *t) {
    return (void)t, splat(tail(x, k, block)->scale);
}

INLINE f32v finish(const sums sum, const f32v scale, const f32v of_x, const f32v out) {
    return multiply_add(__builtin_convertvector(sum, f32v), of_x * scale, out);
}

#include "kernels/loops/panel.h"

#define INT_ROWS rows_int8
#define INT_ROWS_SUMS rows_int8
#include "kernels/common/int_ways.h"

const kt_kernel KT_NAME(int_int8)[] = {
    INT_WAYS,
    {0},
};
