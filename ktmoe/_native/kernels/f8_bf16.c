/* f8 with VDPBF16PS: E4M3 becomes bf16, exactly; see e4m3_bf16.h, bf16.h and panel.h.
 *
 * DEFINITION  folded: w = code * 2^(b-127), exact in bf16, one chain over all k
 *             else:   w = code, a sum per group, out = fma(sum, scale, out); or one chain where there are no scales
 * LAYOUT      pack/layout.h. A vector of codes is 4 k of 16 columns; the lower and the upper bytes of its words are the k-pairs.
 */
#include "kernels/common/bf16.h"
#include "kernels/common/f8_words.h"
#include "kernels/common/isa.h"

enum { IN_PLACE = 0, FEW_ROWS = 12, FEW_MAX = 12, EIGHTS_APART = 0 };

#include "kernels/loops/panel.h"

FUNCTIONS(none, NONE)
FUNCTIONS(folded, UE8M0 | FOLDED)
FUNCTIONS(ue8m0, UE8M0)
FUNCTIONS(panel, PANEL)

#define F8 .family = "f8", .element = "E4M3", .rows = &KT_FORM(rows_bf16)
const kt_kernel KT_NAME(f8_bf16)[] = {
    {F8, .scale = "none", SERVED_BY(none)},
    {F8, .scale = "ue8m0", PER_BLOCK, .folded = 1, SERVED_BY(folded)},
    {F8, .scale = "ue8m0", PER_BLOCK, SERVED_BY(ue8m0)},
    {F8, .scale = "panel", PER_BLOCKS, SERVED_BY(panel)},
    {0},
};
