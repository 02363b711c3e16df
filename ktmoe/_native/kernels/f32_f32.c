/* f32 in fp32: weights as they stand; see f32.h and panel.h.
 *
 * DEFINITION  w = the float as packed; for k ascending: out = multiply_add(x, w, out), which portably rounds the product, too
 * LAYOUT      pack/layout.h. A vector is one k of its columns.
 */
#define PACKED_FLOATS 1
#include "kernels/common/f32.h"
#include "kernels/common/isa.h"
#include "kernels/common/no_table.h"
#include "kernels/common/place.h"
#include "kernels/common/scales.h"

enum {
    K_BYTES = KT_PANEL * 4,
    BLOCK_BYTES = KT_BLOCK * K_BYTES,
    CODE_BITS = 32,
    ROW_BYTES = K_BYTES,
    SIXTEEN_BYTES = 16 * 4,
    AS_PACKED = 1,
};

INLINE int code_bit(const int b) { return (void)b, -1; }

INLINE u32v decode(const place *p, const int v, const int k, const scaling how, const table *t, const fold *f) {
    (void)how, (void)t, (void)f;
    return load_u32(p->block + (p->octet * 8 + k) * K_BYTES + v * LANES * 4);
}

#include "kernels/loops/panel.h"

FUNCTIONS(none, NONE)

const kt_kernel KT_NAME(f32_f32)[] = {
    {.family = "f32", .scale = "none", .rows = &KT_FORM(rows_f32), SERVED_BY(none)},
    {0},
};
