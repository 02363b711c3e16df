/* q4 in fp32: a vector lookup gives fp32 weights; see f32.h and panel.h.
 *
 * DEFINITION  w = values[code], less the zero point if there is one, exact in fp32: both are small integers then;
 *             for k ascending: sum = x * w + sum, whose product is exact but for fp32's range; for each scale group:
 *             out = fma(sum, scale, out); or one chain where there are no scales
 * LAYOUT      pack/layout.h. A code dword holds 8 k of one column; the nibble of k is at bit nibble_bit(k).
 */
#include "kernels/common/f32.h"
#include "kernels/common/isa.h"
#include "kernels/common/q4_values.h"

#include "kernels/loops/panel.h"

#define Q4_ROWS rows_f32
#define Q4_ROWS_SUMS rows_f32_sums
#include "kernels/common/q4_ways.h"

const kt_kernel KT_NAME(q4_f32)[] = {
    Q4_WAYS,
    {0},
};
