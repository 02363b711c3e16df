/* b16 with VDPBF16PS: packed weights are its operands as they stand; see bf16.h and panel.h.
 *
 * LAYOUT      pack/b16.c. A vector is a k-pair of 16 columns.
 */
#include "kernels/common/b16_layout.h"
#include "kernels/common/bf16.h"
#include "kernels/common/isa.h"

enum { IN_PLACE = 1 };

typedef char table;
typedef char fold;

INLINE table load_table(const kt_dot *a, const scaling how) { return (void)a, (void)how, 0; }
INLINE fold load_fold(const uint8_t *header, const int v, const scaling how) { return (void)header, (void)v, (void)how, 0; }

INLINE u32v decode(const place *p, const int v, const int pair, const scaling how, const table *t, const fold *f) {
    (void)how, (void)t, (void)f;
    return load_u32(pair_at(p, v, pair));
}

#include "kernels/loops/panel.h"

FUNCTIONS(none, NONE)

const kt_kernel KT_NAME(b16_bf16)[] = {
    {.family = "b16", .scale = "none", .rows = &KT_NAME(rows_bf16), SERVED_BY(none)},
    {0},
};
