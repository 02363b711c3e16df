/* i8 with VDPBF16PS: an integer of 8 bits is a bf16, exactly; see i8_values.h, bf16.h and panel.h.
 *
 * DEFINITION  w = q, a sum per group, out = fma(sum, scale, out); or one chain where there are no scales
 * LAYOUT      pack/layout.h. A vector of codes is 4 k of 16 columns; the lower and the upper bytes of its words are the k-pairs.
 */
#include "kernels/common/bf16.h"
#include "kernels/common/i8_words.h"
#include "kernels/common/isa.h"

enum { IN_PLACE = 0, FEW_ROWS = 12 };

#include "kernels/loops/panel.h"

#define I8_ROWS rows_bf16
#define I8_ROWS_SUMS rows_bf16_sums
#include "kernels/common/i8_ways.h"

FUNCTIONS(panel, PANEL)

const kt_kernel KT_NAME(i8_bf16)[] = {
    I8_WAYS,
    {I8, .scale = "panel", PER_BLOCKS, SERVED_BY(panel)},
    {0},
};
