/* Integers with VDPBF16PS: one of up to 8 bits is a bf16, exactly; see int_words.h, bf16.h and panel.h.
 *
 * DEFINITION  w = code - code of 0, a sum per group, out = fma(sum, scale, out); or one chain where there are no scales
 * LAYOUT      pack/layout.h. A vector of codes is 4 k of 16 columns; the lower and the upper bytes of its words are the k-pairs.
 */
#include "kernels/common/bf16.h"
#include "kernels/common/int_words.h"
#include "kernels/common/isa.h"

enum { IN_PLACE = 0, FEW_ROWS = 6, FEW_MAX = 6, EIGHTS_APART = 1 };

#include "kernels/loops/panel.h"

#define INT_ROWS rows_bf16
#define INT_ROWS_SUMS rows_bf16_sums
#include "kernels/common/int_ways.h"

FUNCTIONS(panel, PANEL | 8 * CODE)

const kt_kernel KT_NAME(int_bf16)[] = {
    INT_WAYS,
    {INT(8), .scale = "panel", PER_BLOCKS, SERVED_BY(panel)},
    {0},
};
