/* b16 with VDPBF16PS: packed weights are its operands as they stand; see bf16.h and panel.h.
 *
 * LAYOUT      pack_b16.c. A vector is a k-pair of 16 columns.
 */
#include "kernels/avx512_bf16/kernels.h"

#include "kernels/avx512_bf16/bf16.h"
#include "kernels/b16_layout.h"

enum { IN_PLACE = 1 };

typedef char table;
typedef char fold;

INLINE table load_table(const kt_dot *a, const enum scales kind) { return (void)a, (void)kind, 0; }
INLINE fold load_fold(const uint8_t *scales, const int v) { return (void)scales, (void)v, 0; }

INLINE u32v decode(const uint8_t *octet, const int v, const int pair, const enum scales kind, const table *t, const fold *f) {
    (void)kind, (void)t, (void)f;
    return load_u32(pair_at(octet, v, pair));
}

#include "kernels/panel.h"

static void few_b16(const kt_dot *a) { few(a, NO_SCALES); }
static void many_b16(const kt_dot *a) { many(a, NO_SCALES); }

const kt_kernel kt_b16_avx512_bf16[] = {
    {
        .family = "b16",
        .scale = "none",
        .rows = &kt_rows_avx512_bf16,
        .few_max = 12,
        .scratch_bytes = sizeof(panel_block),
        .few = few_b16,
        .many = many_b16,
    },
    {0},
};
