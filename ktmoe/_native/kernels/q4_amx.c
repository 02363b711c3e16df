/* q4 with UE8M0 scales that fold, by TDPBF16PS: VPERMW looks up bf16 weights in k-pairs; see tiles.h.
 *
 * DEFINITION  w = codebook[code] * 2^(b-127), exact in bf16
 * LAYOUT      pack/layout.h. A vector of codes is 8 k of 16 columns; words moved down by 0, 4, 8, 12 and VPERMW give the k-pairs.
 */
#include <immintrin.h>

#include "kernels/common/isa.h"
#include "kernels/common/nibbles.h"
#include "kernels/common/q4_words.h"
#include "kernels/common/tile.h"

enum { IN_PLACE = 0, STEP_K = 2, B_STRIDE = 0, TERMS = 1, STEP_BYTES = BLOCK_BYTES };

#include "kernels/common/steps.h"

typedef struct weights {
    steps at;
    __m512i table;
} weights;
typedef __m512i tile_fold;

INLINE weights open_panel(const kt_dot *a, const size_t p, const scaling how) {
    return (weights){steps_of(a, p, how), _mm512_loadu_si512(a->codebook->folded)};
}

INLINE const uint8_t *tile_at(const weights *w, const size_t step, const int n) {
    return step_of(&w->at, step) + n * SIXTEEN_BYTES;
}

INLINE tile_fold load_tile_fold(const weights *w, const size_t step, const int n) {
    return ue8m0_fold(header_of(&w->at, step) + 16 * n, 253);
}

INLINE void decode_quarter(const weights *w, const tile_fold *f, const size_t step, const int n, const int quarter,
                           uint8_t *to) {
    const __m512i codes = _mm512_loadu_si512(tile_at(w, step, n) + quarter * OCTET_BYTES);
    to += quarter * QUARTER_BYTES;
#pragma GCC unroll 4
    for (int pair = 0; pair < 4; pair++, to += TILE_ROW_BYTES) {
        const __m512i down = nibbles_of(codes, pair);
        _mm512_storeu_si512(to, _mm512_subs_epu16(_mm512_permutexvar_epi16(down, w->table), *f));
    }
}

#include "kernels/loops/tiles.h"

FUNCTIONS(folded, UE8M0 | FOLDED)

const kt_kernel KT_NAME(q4_amx)[] = {
    {.family = "q4",
     .scale = "ue8m0",
     .scale_group_min = KT_BLOCK,
     .scale_group_max = KT_BLOCK,
     .folded = 1,
     SERVED_BY(folded)},
    {0},
};
