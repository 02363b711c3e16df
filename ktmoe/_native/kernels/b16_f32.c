/* b16 in fp32: a bfloat16 is the upper half of a float; see f32.h and panel.h.
 *
 * DEFINITION  w = the float of bits << 16; for k ascending: out = x * w + out, whose product is exact but for fp32's range
 * LAYOUT      pack/layout.h. A dword holds two k of one column, the even one below.
 */
#include "kernels/common/b16_layout.h"
#include "kernels/common/f32.h"
#include "kernels/common/isa.h"
#include "kernels/common/no_table.h"

enum { AS_PACKED = 1 };

INLINE u32v decode(const place *p, const int v, const int k, const scaling how, const table *t, const fold *f) {
    (void)how, (void)t, (void)f;
    const u32v pair = load_u32(pair_at(p, v, k / 2));
    return k % 2 ? pair & 0xFFFF0000 : pair << 16;
}

#include "kernels/loops/panel.h"

FUNCTIONS(none, NONE)

const kt_kernel KT_NAME(b16_f32)[] = {
    {.family = "b16", .scale = "none", .rows = &KT_FORM(rows_f32), SERVED_BY(none)},
    {0},
};
