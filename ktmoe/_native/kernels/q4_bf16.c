/* q4 with VDPBF16PS: VPERMW looks up bf16 weights in k-pairs; see bf16.h and panel.h.
 *
 * DEFINITION  folded: w = codebook[code] * 2^(b-127), exact in bf16, one chain over all k
 *             else:   w = codebook[code], or code - zero point, a sum per group, out = fma(sum, scale, out)
 * LAYOUT      pack/q4.c. A vector of codes is 8 k of 16 columns; word shifts 0, 4, 8, 12 and VPERMW give the k-pairs.
 */
#include "kernels/common/bf16.h"
#include "kernels/common/isa.h"
#include "kernels/common/q4_layout.h"
#include "kernels/common/ue8m0_fold.h"

enum { IN_PLACE = 0 };

typedef __m512i table;
typedef __m512i fold;

INLINE table load_table(const kt_dot *a, const scaling how) {
    return _mm512_loadu_si512(how & FOLDED        ? a->codebook->folded
                              : how & ZERO_POINTS ? a->codebook->signed5
                                                  : a->codebook->plain);
}

/* Scales to be folded; or zero points, in both words of each column. */
INLINE fold load_fold(const uint8_t *header, const int v, const scaling how) {
    if (how & FOLDED) return ue8m0_fold(header + 16 * v, 253);
    const u32v z = load_zero_points(header, v, how);
    return (fold)(z | z << 16);
}

INLINE u32v decode(const place *p, const int v, const int pair, const scaling how, const table *t, const fold *f) {
    const __m512i codes = _mm512_loadu_si512(codes_at(p, v));
    __m512i index = pair ? _mm512_srli_epi16(codes, pair * 4) : codes;
    if (how & ZERO_POINTS) index = _mm512_sub_epi16(_mm512_and_si512(index, _mm512_set1_epi16(15)), *f);
    const __m512i w = _mm512_permutexvar_epi16(index, *t);
    return (u32v)(how & FOLDED ? _mm512_subs_epu16(w, *f) : w);
}

#include "kernels/loops/panel.h"

#define Q4_ROWS rows_bf16
#define Q4_ROWS_SUMS rows_bf16_sums
#include "kernels/common/q4_ways.h"

FUNCTIONS(folded, UE8M0 | FOLDED)

const kt_kernel KT_NAME(q4_bf16)[] = {
    {Q4, .scale = "ue8m0", PER_BLOCK, .folded = 1, SERVED_BY(folded)},
    Q4_WAYS,
    {0},
};
