/* b16 in fp32: a bfloat16 is the upper half of a float; see f32.h and panel.h.
 *
 * LAYOUT      pack/b16.c. A dword holds two k of one column, the even one below.
 */
#include "kernels/common/b16_layout.h"
#include "kernels/common/f32.h"

typedef char table;

INLINE table load_table(const kt_dot *a, const enum scale_kind kind) { return (void)a, (void)kind, 0; }

INLINE u32v decode(const uint8_t *octet, const int v, const int k, const enum scale_kind kind, const table *t, const fold *f) {
    (void)kind, (void)t, (void)f;
    const u32v pair = load_u32(pair_at(octet, v, k / 2));
    return k % 2 ? pair & 0xFFFF0000 : pair << 16;
}

#include "kernels/loops/panel.h"

FORMS(b16, NO_SCALES)

const kt_kernel KT_NAME(b16_f32)[] = {
    {
        .family = "b16",
        .scale = "none",
        .rows = &KT_NAME(rows_f32),
        .few_max = FEW_MAX,
        .scratch_bytes = sizeof(decoded_panel),
        .few = few_b16,
        .many = many_b16,
    },
    {0},
};
