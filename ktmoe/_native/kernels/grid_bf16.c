/* Records of a grid, or of digits to base 3, with VDPBF16PS: they become q4's blocks in L1, which are decoded as q4_bf16.c's; see
 * grid.h, ternary.h, bf16.h and panel.h.
 *
 * DEFINITION  w = codebook[code], a sum per group, out = fma(sum, (2 s + 1) * super-scale, out). Digits have one scale alone
 * LAYOUT      pack/layout.h; what is decoded is q4's
 */
#include "kernels/common/bf16.h"
#include "kernels/common/isa.h"
#include "kernels/common/q4_words.h"

#define EXPANDS 1
#include "kernels/common/grid.h"

enum { IN_PLACE = 0, FEW_ROWS = 12, FEW_MAX = 12, EIGHTS_APART = 0 };

#include "kernels/loops/panel.h"

#define GRID_ROWS rows_bf16
#include "kernels/common/grid_ways.h"

const kt_kernel KT_NAME(grid_bf16)[] = {
    GRID_WAYS,
    {0},
};
