/* Records of a grid, or of digits to base 3, in fp32: they become q4's blocks in L1, which are decoded as q4_f32.c's; see grid.h,
 * ternary.h, f32.h and panel.h.
 *
 * DEFINITION  w = values[code], exact in fp32; for k ascending: sum = x * w + sum; for each scale group:
 *             out = fma(sum, (2 s + 1) * super-scale, out). Digits have one scale alone
 * LAYOUT      pack/layout.h; what is decoded is q4's
 */
#include "kernels/common/f32.h"
#include "kernels/common/isa.h"
#include "kernels/common/q4_values.h"

#define EXPANDS 1
#include "kernels/common/grid.h"

#include "kernels/loops/panel.h"

#define GRID_ROWS rows_f32
#include "kernels/common/grid_ways.h"

const kt_kernel KT_NAME(grid_f32)[] = {
    GRID_WAYS,
    {0},
};
