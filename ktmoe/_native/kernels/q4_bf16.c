/* q4 with VDPBF16PS: VPERMW looks up bf16 weights in k-pairs; see bf16.h and panel.h.
 *
 * DEFINITION  folded: w = codebook[code] * 2^(b-127), exact in bf16, one chain over all k
 *             else:   w = codebook[code], or code - zero point, a sum per group, out = fma(sum, scale, out)
 * LAYOUT      pack/layout.h. A vector of codes is 8 k of 16 columns; word shifts 0, 4, 8, 12 and VPERMW give the k-pairs.
 */
#include "kernels/common/bf16.h"
#include "kernels/common/isa.h"
#include "kernels/common/q4_words.h"

enum { IN_PLACE = 0, FEW_ROWS = 12, FEW_MAX = 12, EIGHTS_APART = 0 };

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
