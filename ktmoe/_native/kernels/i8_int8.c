/* i8 with 8-bit x; see int8.h and panel.h.
 *
 * DEFINITION  for each 32 k: sum of (code + 128) * q, begun at -128 * sum of q, exact; or, without VPDPBUSD, of |code| * (q with
 *             code's sign);
 *             out = fma(sum, scale of x * scale, out): sum has 20 bits, and the product of both scales at most 19, so that it is exact
 *             but for fp32's range. Without scales, scale is 1. With a super-scale it has up to 27 bits, and is rounded
 * LAYOUT      pack/layout.h. The bytes of a dword are k0 k4 k1 k5 or k2 k6 k3 k7, and so are those of x.
 * REGULARITIES two products of VPMADDUBSW, at most 2 * 128 * 127, never saturate; with code + 128 they would. 128 is a byte that
 *             is not negative, and no q is -128.
 */
#include "kernels/common/byte_layout.h"
#include "kernels/common/int8.h"
#include "kernels/common/isa.h"
#include "kernels/common/no_fold.h"

INLINE u32v decode(const place *p, const int v, const int quad, const scaling how, const table *t, const fold *f) {
    (void)how, (void)t, (void)f;
    const u32v codes = load_u32(quad_at(p, v, quad));
    return SUMS_OF_WORDS ? codes ^ 0x80808080 : codes;
}

INLINE sums start(const void *x, const size_t k, const size_t block, const int span) {
    return SUMS_OF_WORDS ? (sums)splat(0) : minus_16_sums(x, k, block, span) << 3;
}

INLINE sums dot(const sums sum, const u32v w, const u32v x) {
#if SUMS_OF_WORDS
    const u32v size = (u32v)_mm256_abs_epi8((__m256i)w), with_sign = (u32v)_mm256_sign_epi8((__m256i)x, (__m256i)w);
    return sum + add_words(products(size, with_sign));
#else
    return dot_bytes(sum, w, x);
#endif
}

INLINE f32v factor(const void *x, const size_t k, const size_t block, const table *t) {
    return (void)t, splat(tail(x, k, block)->scale);
}

INLINE f32v finish(const sums sum, const f32v scale, const f32v of_x, const f32v out) {
    return multiply_add(__builtin_convertvector(sum, f32v), of_x * scale, out);
}

#include "kernels/loops/panel.h"

#define I8_ROWS rows_int8
#define I8_ROWS_SUMS rows_int8
#include "kernels/common/i8_ways.h"

const kt_kernel KT_NAME(i8_int8)[] = {
    I8_WAYS,
    {0},
};
