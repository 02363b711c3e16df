/* b16 by TDPBF16PS: packed weights are tiles of B as they stand; see tiles.h.
 *
 * DEFINITION  w = the bf16 as packed: nothing is decoded; one chain over all k
 * LAYOUT      pack/layout.h. A k-pair of 16 columns is 64 bytes, the next k-pair a panel's row further.
 */
#include "kernels/common/b16_words.h"
#include "kernels/common/isa.h"

enum { IN_PLACE = 1, AS_PACKED = 1, STEP_K = 2, B_STRIDE = PAIR_BYTES, TERMS = 1, STEP_BYTES = BLOCK_BYTES };

#include "kernels/common/steps.h"

typedef struct weights {
    steps at;
} weights;
typedef char tile_fold;

INLINE weights open_panel(const kt_dot *a, const size_t p, const scaling how) { return (weights){steps_of(a, p, how)}; }

INLINE const uint8_t *tile_at(const weights *w, const size_t step, const int n) { return step_of(&w->at, step) + n * 64; }

INLINE tile_fold load_tile_fold(const weights *w, const size_t step, const int n) { return (void)w, (void)step, (void)n, 0; }

INLINE void decode_quarter(const weights *w, const tile_fold *f, const size_t step, const int n, const int quarter,
                           uint8_t *to) {
    (void)w, (void)f, (void)step, (void)n, (void)quarter, (void)to;
}

#include "kernels/loops/tiles.h"

FUNCTIONS(none, NONE)

const kt_kernel KT_NAME(b16_amx)[] = {
    {.family = "b16", .scale = "none", SERVED_BY(none)},
    {0},
};
