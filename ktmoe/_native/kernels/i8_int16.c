/* i8 with VPMADDWD or VPDPWSSD and 16-bit x; see int16.h and panel.h.
 *
 * DEFINITION  for each 32 k: sum of (code + 128) * q, begun at -128 * sum of q, exact in int32, since 32 * 255 * 32640 < 2^28;
 *             out = fma(float(sum) * scale of x, scale, out): float() rounds sums of more than 24 bits, and the product is exact but
 *             for fp32's range. Without scales, scale is 1
 * LAYOUT      pack/layout.h. The lower and the upper bytes of a dword's words are k-pairs.
 */
#include "kernels/common/byte_layout.h"
#include "kernels/common/int16.h"
#include "kernels/common/isa.h"
#include "kernels/common/no_fold.h"

INLINE u32v decode(const place *p, const int v, const int pair, const scaling how, const table *t, const fold *f) {
    (void)how, (void)t, (void)f;
    return bytes_of_words(load_u32(quad_at(p, v, pair % 2)), pair / 2);
}

INLINE sums start(const void *x, const size_t k, const size_t block, const int span) {
    return minus_16_sums(x, k, block, span) << 3;
}

INLINE f32v factor(const void *x, const size_t k, const size_t block, const table *t) {
    return (void)t, splat(tail(x, k, block)->scale);
}

#include "kernels/loops/panel.h"

#define I8_ROWS rows_int16
#define I8_ROWS_SUMS rows_int16
#include "kernels/common/i8_ways.h"

const kt_kernel KT_NAME(i8_int16)[] = {
    I8_WAYS,
    {0},
};
