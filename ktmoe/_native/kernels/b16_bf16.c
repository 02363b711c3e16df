/* b16 with VDPBF16PS: packed weights are its operands as they stand; see bf16.h and panel.h.
 *
 * LAYOUT      pack/b16.c. A vector is a k-pair of 16 columns.
 */
#include "kernels/common/b16_layout.h"
#include "kernels/common/bf16.h"

enum { IN_PLACE = 1 };

typedef char table;
typedef char fold;

INLINE table load_table(const kt_dot *a, const enum scale_kind kind) { return (void)a, (void)kind, 0; }
INLINE fold load_fold(const uint8_t *scales, const int v) { return (void)scales, (void)v, 0; }

INLINE u32v decode(const uint8_t *octet, const int v, const int pair, const enum scale_kind kind, const table *t,
                   const fold *f) {
    (void)kind, (void)t, (void)f;
    return load_u32(pair_at(octet, v, pair));
}

#include "kernels/loops/panel.h"

FORMS(b16, NO_SCALES)

const kt_kernel KT_NAME(b16_bf16)[] = {
    {
        .family = "b16",
        .scale = "none",
        .rows = &KT_NAME(rows_bf16),
        .few_max = FEW_MAX,
        .scratch_bytes = sizeof(decoded_panel),
        .few = few_b16,
        .many = many_b16,
    },
    {0},
};
