/* q4 with VDPBF16PS: VPERMW looks up bf16 weights in k-pairs; see bf16.h and panel.h.
 *
 * DEFINITION  folded: w = codebook[code] * 2^(b-127), exact in bf16, one chain over all k
 *             else:   w = codebook[code], a sum per group, out = fma(sum, scale, out)
 * LAYOUT      pack/q4.c. A vector of codes is 8 k of 16 columns; word shifts 0, 4, 8, 12 and VPERMW give the k-pairs.
 */
#include "kernels/common/bf16.h"
#include "kernels/common/q4_layout.h"
#include "kernels/common/ue8m0_fold.h"

enum { IN_PLACE = 0 };

typedef __m512i table;
typedef __m512i fold;

INLINE table load_table(const kt_dot *a, const enum scale_kind kind) {
    return _mm512_loadu_si512(kind == FOLDED_UE8M0 ? a->codebook->folded : a->codebook->plain);
}

INLINE fold load_fold(const uint8_t *scales, const int v) { return ue8m0_fold(scales + 16 * v); }

INLINE u32v decode(const uint8_t *octet, const int v, const int pair, const enum scale_kind kind, const table *t,
                   const fold *f) {
    const __m512i codes = _mm512_loadu_si512(codes_at(octet, v));
    const __m512i w = _mm512_permutexvar_epi16(pair ? _mm512_srli_epi16(codes, pair * 4) : codes, *t);
    return (u32v)(kind == FOLDED_UE8M0 ? _mm512_subs_epu16(w, *f) : w);
}

#include "kernels/loops/panel.h"

FORMS(folded, FOLDED_UE8M0)
FORMS(ue8m0, UE8M0_SCALES)
FORMS(bf16, BF16_SCALES)

#define Q4 .family = "q4", .rows = &KT_NAME(rows_bf16), .few_max = FEW_MAX, .scratch_bytes = sizeof(decoded_panel)
const kt_kernel KT_NAME(q4_bf16)[] = {
    {Q4, .scale = "ue8m0", .scale_group_max = KT_BLOCK, .folded = 1, .few = few_folded, .many = many_folded},
    {Q4, .scale = "ue8m0", .scale_group_max = KT_BLOCK, .few = few_ue8m0, .many = many_ue8m0},
    {Q4, .scale = "bf16", .scale_group_max = KT_SCALE_GROUP_MAX, .few = few_bf16, .many = many_bf16},
    {0},
};
