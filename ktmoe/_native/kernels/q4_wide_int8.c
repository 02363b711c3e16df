/* q4 with 8-bit x, codes that stand for integers of size up to 127, IQ4's; see q4_int8.h, int8.h and panel.h.
 *
 * DEFINITION  for each 32 k: sum of whole * q, exact: of (whole + 128) * q, begun at -128 * sum of q;
 *             or, without VPDPBUSD, of |whole| * (q with whole's sign);
 *             out = fma(sum * (scale of x * unit), scale, out): sum has 20 bits and the scale of x has 8, so that their product is
 *             rounded
 * LAYOUT      kernels/q4_int8.c has it
 * REGULARITIES two products of VPMADDUBSW, at most 2 * 127 * 127, never saturate
 */
#define WHOLE_MAX 127
#include "kernels/common/isa.h"
#include "kernels/common/q4_int8.h"

#include "kernels/loops/panel.h"

FUNCTIONS(fp16, FP16)
FUNCTIONS(super, INT8 | SUPER)

#define WIDE .family = "q4", .rows = &KT_FORM(rows_int8), .whole = WHOLE_MAX

const kt_kernel KT_NAME(q4_wide_int8)[] = {
    {WIDE, .scale = "fp16", PER_BLOCK, SERVED_BY(fp16)},
    {WIDE, .scale = "int8", .super_scale = "fp16", PER_BLOCK, SERVED_BY(super)},
    {0},
};
