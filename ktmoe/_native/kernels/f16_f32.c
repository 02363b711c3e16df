/* f16 in fp32: an fp16 number is an fp32 one; see f32.h and panel.h.
 *
 * DEFINITION  w = the fp16 number; for k ascending: out = x * w + out, whose product of 8 + 11 bits is exact but for fp32's
 *             range
 * LAYOUT      pack/layout.h. A dword holds two k of one column, the even one below.
 */
#include "kernels/common/b16_layout.h"
#include "kernels/common/f32.h"
#include "kernels/common/isa.h"
#include "kernels/common/no_table.h"

enum { AS_PACKED = 0 };

INLINE u32v decode(const place *p, const int v, const int k, const scaling how, const table *t, const fold *f) {
    (void)how, (void)t, (void)f;
    const u32v pair = load_u32(pair_at(p, v, k / 2));
#if VECTOR_BYTES == 64
    /* Denormal numbers cost nothing here; as factors of a multiplication, some CPUs take long for them. */
    return (u32v)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)(k % 2 ? pair >> 16 : pair)));
#else
    return (u32v)fp16_at_top(k % 2 ? pair : pair << 16);
#endif
}

#include "kernels/loops/panel.h"

FUNCTIONS(none, NONE)

const kt_kernel KT_NAME(f16_f32)[] = {
    {.family = "f16", .scale = "none", .rows = &KT_FORM(rows_f32), SERVED_BY(none)},
    {0},
};
