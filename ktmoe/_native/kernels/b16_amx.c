/* b16 by TDPBF16PS: packed weights are tiles of B as they stand; see tiles.h.
 *
 * LAYOUT      pack/b16.c. A k-pair of 16 columns is 64 bytes, the next k-pair a panel's row further.
 */
#include "kernels/common/b16_layout.h"
#include "kernels/common/isa.h"

enum { IN_PLACE = 1, B_STRIDE = PAIR_BYTES, STEP_BYTES = BLOCK_BYTES };

typedef struct weights {
    const uint8_t *packed;
} weights;

INLINE weights open_panel(const kt_dot *a, const size_t p, const int how) { return (void)how, (weights){a->w[p]}; }

INLINE const uint8_t *step_at(const weights *w, const size_t step) { return w->packed + step * STEP_BYTES; }

INLINE const uint8_t *tile_at(const weights *w, const size_t step, const int n) { return step_at(w, step) + n * 64; }

INLINE void decode_tile(const weights *w, const size_t step, const int n, uint8_t *to) {
    (void)w, (void)step, (void)n, (void)to;
}

#include "kernels/loops/tiles.h"

FUNCTIONS(none, NONE)

const kt_kernel KT_NAME(b16_amx)[] = {
    {.family = "b16", .scale = "none", SERVED_BY(none)},
    {0},
};
