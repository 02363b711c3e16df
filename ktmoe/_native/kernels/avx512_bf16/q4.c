/* q4 with VDPBF16PS: VPERMW looks up bf16 weights in k-pairs; see bf16.h and panel.h.
 *
 * DEFINITION  folded: w = codebook[code] * 2^(b-127), exact in bf16, one chain over all k
 *             else:   w = codebook[code], a sum per group, out = fma(sum, scale, out)
 * LAYOUT      pack_q4.c. A vector of codes is 8 k of 16 columns; word shifts 0, 4, 8, 12 and VPERMW give the k-pairs.
 */
#include "kernels/avx512_bf16/kernels.h"

#include "kernels/avx512_bf16/bf16.h"
#include "kernels/q4_layout.h"
#include "kernels/ue8m0_fold.h"

enum { IN_PLACE = 0 };

typedef __m512i table;
typedef __m512i fold;

INLINE table load_table(const kt_dot *a, const enum scales kind) {
    return _mm512_loadu_si512(kind == FOLDED_UE8M0 ? a->codebook->folded : a->codebook->plain);
}

INLINE fold load_fold(const uint8_t *scales, const int v) { return ue8m0_fold(scales + 16 * v); }

INLINE u32v decode(const uint8_t *octet, const int v, const int pair, const enum scales kind, const table *t, const fold *f) {
    const __m512i codes = _mm512_loadu_si512(codes_at(octet, v));
    const __m512i w = _mm512_permutexvar_epi16(pair ? _mm512_srli_epi16(codes, pair * 4) : codes, *t);
    return (u32v)(kind == FOLDED_UE8M0 ? _mm512_subs_epu16(w, *f) : w);
}

#include "kernels/panel.h"

static void few_folded(const kt_dot *a) { few(a, FOLDED_UE8M0); }
static void many_folded(const kt_dot *a) { many(a, FOLDED_UE8M0); }
static void few_ue8m0(const kt_dot *a) { few(a, UE8M0_SCALES); }
static void many_ue8m0(const kt_dot *a) { many(a, UE8M0_SCALES); }
static void few_bf16(const kt_dot *a) { few(a, BF16_SCALES); }
static void many_bf16(const kt_dot *a) { many(a, BF16_SCALES); }

#define Q4 .family = "q4", .rows = &kt_rows_avx512_bf16, .few_max = 12, .scratch_bytes = sizeof(panel_block)
const kt_kernel kt_q4_avx512_bf16[] = {
    {Q4, .scale = "ue8m0", .group_max = KT_GROUP, .folded = 1, .few = few_folded, .many = many_folded},
    {Q4, .scale = "ue8m0", .group_max = KT_GROUP, .few = few_ue8m0, .many = many_ue8m0},
    {Q4, .scale = "bf16", .group_max = KT_GROUP_MAX, .few = few_bf16, .many = many_bf16},
    {0},
};
