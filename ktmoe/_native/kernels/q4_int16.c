/* q4 with VPMADDWD or VPDPWSSD: codes stand for small integers, x for 16-bit ones; see int16.h and panel.h.
 *
 * DEFINITION  for each 32 k, or 16 where these have a scale: sum of (whole + 16) * q, begun at -16 * sum of q, exact in int32;
 *             whole is whole[code], or code - zero point: of size 16 at most;
 *             out = fma(sum * (scale of x * unit), scale, out): sum is exact in fp32, since 32 * 16 * 32640 < 2^24, and
 *             both products are but for fp32's range
 * LAYOUT      pack/layout.h. The low nibbles of a dword's bytes are k0 k4 k1 k5, the high ones k2 k6 k3 k7: one VPSHUFB looks up
 *             two k-pairs, one of them in the lower, one in the upper bytes of its words. Bytes that are not negative become
 *             words by one instruction.
 */
#include "kernels/common/int16.h"
#include "kernels/common/isa.h"
#include "kernels/common/q4_layout.h"

typedef struct table {
    __m256i whole;
    float unit;
} table;

INLINE table load_table(const kt_codebook *book, const scaling how) {
    (void)how;
    const __m256i whole = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)book->whole));
    return (table){_mm256_add_epi8(whole, _mm256_set1_epi8(16)), book->unit};
}

/* What is added to codes with zero points: a value is its code, and becomes code - z + 16. */
typedef u32v fold;

INLINE u32v fold_columns(const uint8_t *header, const int v, const scaling how) {
    return (16 - load_zero_points(header, v, how)) * 0x01010101;
}
INLINE fold fold_of(const u32v columns, const scaling how) { return (void)how, columns; }

INLINE u32v decode(const place *p, const int v, const int pair, const scaling how, const table *t, const fold *f) {
    const u32v codes = load_u32(codes_at(p, v)), nibbles = (pair % 2 ? codes >> 4 : codes) & 0x0F0F0F0F;
    return bytes_of_words(how & ZERO_POINTS ? nibbles + *f : (u32v)_mm256_shuffle_epi8(t->whole, (__m256i)nibbles), pair >= 2);
}

INLINE sums start(const void *x, const size_t k, const size_t block, const int span) {
    return minus_16_sums(x, k, block, span);
}

INLINE f32v factor(const void *x, const size_t k, const size_t block, const table *t) {
    return splat(tail(x, k, block)->scale) * t->unit;
}

#include "kernels/loops/panel.h"

#define Q4_ROWS rows_int16
#define Q4_ROWS_SUMS rows_int16
#include "kernels/common/q4_ways.h"

const kt_kernel KT_NAME(q4_int16)[] = {
    Q4_WAYS,
    {0},
};
