/* f8 in fp32: shifts and a mask move E4M3's bits to where fp32 has them, and one exact multiplication makes up for the difference
 * of exponents, denormals included; see f32.h, scales.h and panel.h.
 *
 * DEFINITION  w = E4M3(code), exact; for k ascending: sum = x * w + sum, whose product is exact but for fp32's range; for each
 *             scale group: out = fma(sum, scale, out); or one chain where there are no scales
 * LAYOUT      pack/layout.h. A code dword holds 4 k of one column, in its bytes k0 k2 k1 k3.
 */
#include "kernels/common/f32.h"
#include "kernels/common/f8_layout.h"
#include "kernels/common/isa.h"
#include "kernels/common/no_table.h"

/* The bits by which the byte of k moves up to a dword's top. */
INLINE int up(const int k) { return k % 4 == 0 ? 24 : k % 4 == 1 ? 8 : k % 4 == 2 ? 16 : 0; }

INLINE u32v decode(const place *p, const int v, const int k, const scaling how, const table *t, const fold *f) {
    (void)how, (void)t, (void)f;
    return (u32v)e4m3_at_top(load_u32(quad_at(p, v, k / 4)) << up(k));
}

#include "kernels/loops/panel.h"

FUNCTIONS(none, NONE)
FUNCTIONS(ue8m0, UE8M0)
FUNCTIONS(panel, PANEL)

#define F8 .family = "f8", .element = "E4M3", .rows = &KT_FORM(rows_f32)
const kt_kernel KT_NAME(f8_f32)[] = {
    {F8, .scale = "none", SERVED_BY(none)},
    {F8, .scale = "ue8m0", PER_BLOCK, SERVED_BY(ue8m0)},
    {F8, .scale = "panel", PER_BLOCKS, SERVED_BY(panel)},
    {0},
};
