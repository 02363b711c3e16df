/* Integers with VPMADDWD or VPDPWSSD and 16-bit x; see int16.h and panel.h.
 *
 * DEFINITION  for each 32 k, or 16 where these have a scale: sum of code * q, begun at minus the code of 0 times the sum of q, exact
 *             in int32, since 32 * 255 * 32640 < 2^28;
 *             out = fma(float(sum) * scale of x, scale, out): float() rounds sums of more than 24 bits, which codes of 5 bits or more
 *             may have, and the product is exact but for fp32's range. Without scales, scale is 1
 * LAYOUT      pack/layout.h. The lower and the upper bytes of a dword's words are k-pairs.
 */
#include "kernels/common/int16.h"
#include "kernels/common/int_layout.h"
#include "kernels/common/isa.h"
#include "kernels/common/no_fold.h"

typedef int32_t table; /* the code of 0 */

INLINE table load_table(const kt_codebook *book, const scaling how) { return (void)how, book->zero; }

INLINE u32v decode(const place *p, const int v, const int pair, const scaling how, const table *t, const fold *f) {
    (void)t, (void)f;
    const u32v codes = load_codes(p, v, half_of(pair), how);
    const u32v words = byte_of(pair) ? (u32v)_mm256_srli_epi16((__m256i)codes, 8) : codes;
    return byte_of(pair) && bits_of_code(how) == 8 ? words : words & code_mask(how) * 0x00010001u;
}

INLINE sums start(const void *x, const size_t k, const size_t block, const int span, const table *t, const scaling how) {
    return (void)how, minus_sums(x, k, block, span, *t);
}

INLINE f32v factor(const void *x, const size_t k, const size_t block, const table *t) {
    return (void)t, splat(tail(x, k, block)->scale);
}

#include "kernels/loops/panel.h"

#define INT_ROWS rows_int16
#define INT_ROWS_SUMS rows_int16
#include "kernels/common/int_ways.h"

const kt_kernel KT_NAME(int_int16)[] = {
    INT_WAYS,
    {0},
};
