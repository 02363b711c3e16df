/* q4 with VPMADDWD or VPDPWSSD and 16-bit x, codes that stand for integers of size up to 127, IQ4's; see q4_int16.h, int16.h and panel.h.
 *
 * DEFINITION  for each 32 k: sum of (whole + 128) * q, begun at -128 * sum of q, exact in int32;
 *             out = fma(float(sum) * (scale of x * unit), scale, out): float() rounds sums of more than 24 bits, and both products are
 *             exact but for fp32's range
 * LAYOUT      kernels/q4_int16.c has it
 */
#define WHOLE_MAX 127
#include "kernels/common/isa.h"
#include "kernels/common/q4_int16.h"

#include "kernels/loops/panel.h"

FUNCTIONS(fp16, FP16)
FUNCTIONS(super, INT8 | SUPER)

#define WIDE .family = "q4", .rows = &KT_FORM(rows_int16), .whole = WHOLE_MAX

const kt_kernel KT_NAME(q4_wide_int16)[] = {
    {WIDE, .scale = "fp16", PER_BLOCK, SERVED_BY(fp16)},
    {WIDE, .scale = "int8", .super_scale = "fp16", PER_BLOCK, SERVED_BY(super)},
    {0},
};
