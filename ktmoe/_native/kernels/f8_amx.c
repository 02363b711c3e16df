/* f8 by TDPBF16PS, with UE8M0 scales that fold or none: E4M3 becomes bf16, exactly; see e4m3_bf16.h and tiles.h.
 *
 * DEFINITION  w = code * 2^(b-127), exact in bf16; or w = code
 * LAYOUT      pack/f8.c. The lower and the upper bytes of a vector's words are two k-pairs of 16 columns, two rows of a tile.
 */
#include <immintrin.h>

#include "kernels/common/byte_layout.h"
#include "kernels/common/e4m3_bf16.h"
#include "kernels/common/isa.h"
#include "kernels/common/tile.h"
#include "kernels/common/ue8m0_fold.h"

enum { IN_PLACE = 0, B_STRIDE = 0, TERMS = 1, STEP_BYTES = BLOCK_BYTES };

#include "kernels/common/steps.h"

typedef struct weights {
    steps at;
    scaling how;
} weights;
typedef e4m3_to_bf16 fold;

INLINE weights open_panel(const kt_dot *a, const size_t p, const scaling how) { return (weights){steps_of(a, p, how), how}; }

INLINE const uint8_t *tile_at(const weights *w, const size_t step, const int n) {
    return step_of(&w->at, step) + n * SIXTEEN_BYTES;
}

INLINE fold load_fold(const weights *w, const size_t step, const int n) {
    return w->how & FOLDED ? e4m3_folded(ue8m0_fold(header_of(&w->at, step) + 16 * n, 247)) : e4m3_plain();
}

INLINE void decode_quarter(const weights *w, const fold *f, const size_t step, const int n, const int quarter, uint8_t *to) {
    const uint8_t *from = tile_at(w, step, n) + quarter * OCTET_BYTES;
    to += quarter * QUARTER_BYTES;
#pragma GCC unroll 2
    for (int quad = 0; quad < 2; quad++, from += QUAD_BYTES, to += 2 * TILE_ROW_BYTES) {
        const __m512i codes = _mm512_loadu_si512(from);
        _mm512_storeu_si512(to, e4m3_to_words(codes, 0, f, w->how & FOLDED));
        _mm512_storeu_si512(to + TILE_ROW_BYTES, e4m3_to_words(codes, 1, f, w->how & FOLDED));
    }
}

#include "kernels/loops/tiles.h"

FUNCTIONS(none, NONE)
FUNCTIONS(folded, UE8M0 | FOLDED)

#define F8 .family = "f8", .element = "E4M3"
const kt_kernel KT_NAME(f8_amx)[] = {
    {F8, .scale = "none", SERVED_BY(none)},
    {F8, .scale = "ue8m0", .scale_group_min = KT_BLOCK, .scale_group_max = KT_BLOCK, .folded = 1, SERVED_BY(folded)},
    {0},
};
