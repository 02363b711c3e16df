/* b16 with VDPBF16PS: packed weights are its operands as they stand; see bf16.h and panel.h.
 *
 * DEFINITION  w = the bf16 as packed; for pairs of k ascending: out = dot(out, w, x), which is VDPBF16PS (bf16.h)
 * LAYOUT      pack/layout.h. A vector is a k-pair of 16 columns.
 */
#include "kernels/common/b16_words.h"
#include "kernels/common/bf16.h"
#include "kernels/common/isa.h"

enum { IN_PLACE = 1, AS_PACKED = 1, FEW_ROWS = 6, FEW_MAX = 12, EIGHTS_APART = 0 };

#include "kernels/loops/panel.h"

FUNCTIONS(none, NONE)

const kt_kernel KT_NAME(b16_bf16)[] = {
    {.family = "b16", .scale = "none", .rows = &KT_FORM(rows_bf16), SERVED_BY(none)},
    {0},
};
