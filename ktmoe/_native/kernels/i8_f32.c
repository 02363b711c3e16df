/* i8 in fp32: a code in the mantissa of a float, less a constant, is the integer; see i8_values.h, f32.h and panel.h.
 *
 * DEFINITION  w = q; for k ascending: sum = x * w + sum, whose product is exact but for fp32's range; for each scale group:
 *             out = fma(sum, scale, out); or one chain where there are no scales
 * LAYOUT      pack/layout.h. A code dword holds 4 k of one column.
 */
#include "kernels/common/f32.h"
#include "kernels/common/i8_values.h"
#include "kernels/common/isa.h"
#include "kernels/common/no_fold.h"

INLINE u32v decode(const place *p, const int v, const int k, const scaling how, const table *t, const fold *f) {
    (void)how, (void)t, (void)f;
    const int pair = k / 2;
    return (u32v)i8_value(load_u32(quad_at(p, v, quad_of(pair))), byte_of(pair) + k % 2 * 2);
}

#include "kernels/loops/panel.h"

#define I8_ROWS rows_f32
#define I8_ROWS_SUMS rows_f32_sums
#include "kernels/common/i8_ways.h"

FUNCTIONS(panel, PANEL)

const kt_kernel KT_NAME(i8_f32)[] = {
    I8_WAYS,
    {I8, .scale = "panel", PER_BLOCKS, SERVED_BY(panel)},
    {0},
};
