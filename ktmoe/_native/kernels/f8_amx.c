/* f8 by TDPBF16PS: E4M3 becomes bf16, exactly; see e4m3_bf16.h and tiles.h.
 *
 * DEFINITION  folded: w = code * 2^(b-127), exact in bf16, one chain over all k
 *             else:   w = code, a sum per group, out = fma(sum, scale, out); or one chain where there are no scales
 * LAYOUT      pack/layout.h. The lower and the upper bytes of a vector's words are two k-pairs of 16 columns, two rows of a tile.
 */
#include <immintrin.h>

#include "kernels/common/f8_words.h"
#include "kernels/common/isa.h"
#include "kernels/common/tile.h"

enum { IN_PLACE = 0, STEP_K = 2, B_STRIDE = 0, TERMS = 1, STEP_BYTES = BLOCK_BYTES };

#include "kernels/common/steps.h"

typedef struct weights {
    steps at;
    scaling how;
} weights;
typedef __m512i tile_fold; /* 127 - b of scales 2^(b-127) that fold, in the place of the exponent; else 0, as if b were 127 */

INLINE weights open_panel(const kt_dot *a, const size_t p, const scaling how) { return (weights){steps_of(a, p, how), how}; }

INLINE const uint8_t *tile_at(const weights *w, const size_t step, const int n) {
    return step_of(&w->at, step) + n * SIXTEEN_BYTES;
}

INLINE tile_fold load_tile_fold(const weights *w, const size_t step, const int n) {
    return w->how & FOLDED ? ue8m0_fold(header_of(&w->at, step) + 16 * n, 127) : _mm512_setzero_si512();
}

/* A quarter of which some weight is denormal or zero. */
static __attribute__((noinline, cold)) void decode_small(const uint8_t *from, const tile_fold *f, uint8_t *to) {
    const e4m3_to_bf16 e = e4m3_folded(_mm512_add_epi16(*f, _mm512_set1_epi16(120 << 7)));
    for (int row = 0; row < 4; row++, to += TILE_ROW_BYTES) {
        const __m512i codes = _mm512_loadu_si512(from + row / 2 * QUAD_BYTES);
        _mm512_storeu_si512(to, row % 2 ? e4m3_to_words(codes, 1, &e, 1) : e4m3_to_words(codes, 0, &e, 1));
    }
}

INLINE void decode_quarter(const weights *w, const tile_fold *f, const size_t step, const int n, const int quarter,
                           uint8_t *to) {
    const uint8_t *from = tile_at(w, step, n) + quarter * OCTET_BYTES;
    const __m512i codes[2] = {_mm512_loadu_si512(from), _mm512_loadu_si512(from + QUAD_BYTES)};
    to += quarter * QUARTER_BYTES;
    if (__builtin_expect(e4m3_any_small(codes[0]) | e4m3_any_small(codes[1]), 0)) {
        decode_small(from, f, to);
        return;
    }
#pragma GCC unroll 2
    for (int quad = 0; quad < 2; quad++, to += 2 * TILE_ROW_BYTES) {
        const e4m3_words words = e4m3_normal_to_words(codes[quad]);
        const int folded = w->how & FOLDED;
        _mm512_storeu_si512(to, folded ? _mm512_sub_epi16(words.lower, *f) : words.lower);
        _mm512_storeu_si512(to + TILE_ROW_BYTES, folded ? _mm512_sub_epi16(words.upper, *f) : words.upper);
    }
}

#include "kernels/loops/tiles.h"

FUNCTIONS(none, NONE)
FUNCTIONS(folded, UE8M0 | FOLDED)
FUNCTIONS(ue8m0, UE8M0)
FUNCTIONS(panel, PANEL)

#define F8 .family = "f8", .element = "E4M3"
#define PER_BLOCK .scale_group_min = KT_BLOCK, .scale_group_max = KT_BLOCK
#define PER_BLOCKS .scale_group_min = KT_BLOCK, .scale_group_max = KT_SCALE_GROUP_MAX
const kt_kernel KT_NAME(f8_amx)[] = {
    {F8, .scale = "none", SERVED_BY(none)},
    {F8, .scale = "ue8m0", PER_BLOCK, .folded = 1, SERVED_BY(folded)},
    {F8, .scale = "ue8m0", PER_BLOCK, SERVED_BY(ue8m0)},
    {F8, .scale = "panel", PER_BLOCKS, SERVED_BY(panel)},
    {0},
};
