/* b16 in fp32: a bfloat16 is the upper half of a float; see f32.h and panel.h. The includer defines ROWS, the kt_rows of fp32,
 * KERNELS, the name of the array of kernels that this defines, and FEW_MAX.
 *
 * LAYOUT      pack_b16.c. A dword holds two k of one column, the even one below.
 */
#include "kernels/b16_layout.h"
#include "kernels/f32.h"

typedef char table;

INLINE table load_table(const kt_dot *a, const enum scales kind) { return (void)a, (void)kind, 0; }

INLINE u32v decode(const uint8_t *octet, const int v, const int k, const enum scales kind, const table *t, const fold *f) {
    (void)kind, (void)t, (void)f;
    const u32v pair = load_u32(pair_at(octet, v, k / 2));
    return k % 2 ? pair & 0xFFFF0000 : pair << 16;
}

#include "kernels/panel.h"

static void few_b16(const kt_dot *a) { few(a, NO_SCALES); }
static void many_b16(const kt_dot *a) { many(a, NO_SCALES); }

const kt_kernel KERNELS[] = {
    {
        .family = "b16",
        .scale = "none",
        .rows = &ROWS,
        .few_max = FEW_MAX,
        .scratch_bytes = sizeof(panel_block),
        .few = FEW_MAX ? few_b16 : many_b16,
        .many = many_b16,
    },
    {0},
};
