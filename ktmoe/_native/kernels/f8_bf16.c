/* f8 with VDPBF16PS: E4M3 becomes bf16, exactly; see e4m3_bf16.h, bf16.h and panel.h.
 *
 * DEFINITION  folded: w = code * 2^(b-127), exact in bf16, one chain over all k
 *             else:   w = code, a sum per group, out = fma(sum, scale, out); or one chain where there are no scales
 * LAYOUT      pack/f8.c. A vector of codes is 4 k of 16 columns; the lower and the upper bytes of its words are the k-pairs.
 */
#include "kernels/common/bf16.h"
#include "kernels/common/byte_layout.h"
#include "kernels/common/e4m3_bf16.h"
#include "kernels/common/isa.h"
#include "kernels/common/ue8m0_fold.h"

enum { IN_PLACE = 0 };

typedef e4m3_to_bf16 table;
typedef e4m3_to_bf16 fold;

INLINE table load_table(const kt_dot *a, const scaling how) { return (void)a, (void)how, e4m3_plain(); }
INLINE fold load_fold(const uint8_t *header, const int v, const scaling how) {
    return (void)how, e4m3_folded(ue8m0_fold(header + 16 * v, 247));
}

INLINE u32v decode(const place *p, const int v, const int pair, const scaling how, const table *t, const fold *f) {
    const __m512i codes = _mm512_loadu_si512(quad_at(p, v, pair / 2));
    return (u32v)e4m3_to_words(codes, pair % 2, how & FOLDED ? f : t, how & FOLDED);
}

#include "kernels/loops/panel.h"

FUNCTIONS(none, NONE)
FUNCTIONS(folded, UE8M0 | FOLDED)
FUNCTIONS(ue8m0, UE8M0)
FUNCTIONS(panel, PANEL)

#define F8 .family = "f8", .element = "E4M3", .rows = &KT_NAME(rows_bf16)
const kt_kernel KT_NAME(f8_bf16)[] = {
    {F8, .scale = "none", SERVED_BY(none)},
    {F8, .scale = "ue8m0", PER_BLOCK, .folded = 1, SERVED_BY(folded)},
    {F8, .scale = "ue8m0", PER_BLOCK, SERVED_BY(ue8m0)},
    {F8, .scale = "panel", PER_BLOCKS, SERVED_BY(panel)},
    {0},
};
