/* Records of a grid, or of digits to base 3, with VPMADDWD or VPDPWSSD and 16-bit x: they become q4's blocks in L1, whose codes stand
 * for integers of size up to 127; see grid.h, ternary.h, q4_int16.h, int16.h and panel.h.
 *
 * DEFINITION  for each 32 k, or 16 where these have a scale: sum of (whole + 128) * q, begun at -128 * sum of q, exact in int32;
 *             out = fma(float(sum) * (scale of x * unit), (2 s + 1) * super-scale, out): float() rounds sums of more than 24 bits,
 *             and both products are exact but for fp32's range. Digits have one scale alone
 * LAYOUT      pack/layout.h; what is decoded is q4's
 */
#define WHOLE_MAX 127
#include "kernels/common/isa.h"
#include "kernels/common/q4_int16.h"

#define EXPANDS 1
#include "kernels/common/grid.h"

#include "kernels/loops/panel.h"

#define GRID_ROWS rows_int16
#include "kernels/common/grid_ways.h"

const kt_kernel KT_NAME(grid_int16)[] = {
    GRID_WAYS,
    {0},
};
