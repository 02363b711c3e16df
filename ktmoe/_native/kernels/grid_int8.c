/* Records of a grid, or of digits to base 3, with 8-bit x: they become q4's blocks in L1, whose codes stand for integers of size up to
 * 127; see grid.h, ternary.h, q4_int8.h, int8.h and panel.h.
 *
 * DEFINITION  for each 32 k, or 16 where these have a scale: sum of whole * q, exact: of (whole + 128) * q, begun at -128 * sum of q;
 *             or, without VPDPBUSD, of |whole| * (q with whole's sign);
 *             out = fma(sum * (scale of x * unit), (2 s + 1) * super-scale, out): sum has 20 bits and the scale of x has 8, so that
 *             their product is rounded. Digits have one scale alone
 * LAYOUT      pack/layout.h; what is decoded is q4's
 * REGULARITIES two products of VPMADDUBSW, at most 2 * 127 * 127, never saturate
 */
#define WHOLE_MAX 127
#include "kernels/common/isa.h"
#include "kernels/common/q4_int8.h"

#define EXPANDS 1
#include "kernels/common/grid.h"

#include "kernels/loops/panel.h"

#define GRID_ROWS rows_int8
#include "kernels/common/grid_ways.h"

const kt_kernel KT_NAME(grid_int8)[] = {
    GRID_WAYS,
    {0},
};
