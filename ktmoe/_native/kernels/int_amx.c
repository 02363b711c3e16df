/* Integers of 8 bits without scales, by TDPBF16PS: each is a bf16, exactly; see int_values.h and tiles.h.
 *
 * DEFINITION  w = q
 * LAYOUT      pack/layout.h. The lower and the upper bytes of a vector's words are two k-pairs of 16 columns, two rows of a tile.
 */
#include <immintrin.h>

#include "kernels/common/int_words.h"
#include "kernels/common/isa.h"
#include "kernels/common/tile.h"

enum { IN_PLACE = 0, STEP_K = 2, B_STRIDE = 0, TERMS = 1, STEP_BYTES = BLOCK_BYTES, EIGHT_BITS = NONE | 8 * CODE };

#include "kernels/common/steps.h"

typedef struct weights {
    steps at;
    int_base base;
} weights;
typedef char tile_fold;

INLINE weights open_panel(const kt_dot *a, const size_t p, const scaling how) {
    return (weights){steps_of(a, p, how), int_base_of((float)a->codebook->zero)};
}

INLINE const uint8_t *tile_at(const weights *w, const size_t step, const int n) {
    return step_of(&w->at, step) + n * SIXTEEN_BYTES;
}

INLINE tile_fold load_tile_fold(const weights *w, const size_t step, const int n) { return (void)w, (void)step, (void)n, 0; }

INLINE void decode_quarter(const weights *w, const tile_fold *f, const size_t step, const int n, const int quarter,
                           uint8_t *to) {
    (void)f;
    const uint8_t *from = tile_at(w, step, n) + quarter * 2 * ROW_BYTES;
    to += quarter * QUARTER_BYTES;
#pragma GCC unroll 4
    for (int pair = 0; pair < 4; pair++, to += TILE_ROW_BYTES) {
        const u32v codes = load_u32(from + half_of(pair) * ROW_BYTES);
        _mm512_storeu_si512(to, (__m512i)int_pair(codes, byte_of(pair), &w->base, EIGHT_BITS));
    }
}

#include "kernels/loops/tiles.h"

FUNCTIONS(none, EIGHT_BITS)

const kt_kernel KT_NAME(int_amx)[] = {
    {.family = "int", .bits = 8, .scale = "none", SERVED_BY(none)},
    {0},
};
