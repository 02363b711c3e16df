/* q4 with scales that are no powers of two, multiplied into bf16 weights, by TDPBF16PS; see tiles.h.
 *
 * DEFINITION  w = codebook[code] * scale, exact in fp32, rounded once to bf16, RNE. With E2M1 and E4M3 scales there is nothing to
 *             round; with bf16 and fp16 scales the user allows it. No product is denormal (folding.py)
 * LAYOUT      pack/q4.c. A code dword holds 8 k of one column: those of pair j at bits 4 j and 4 j + 16.
 */
#include <immintrin.h>

#include "kernels/common/isa.h"
#include "kernels/common/q4_layout.h"
#include "kernels/common/tile.h"

enum { IN_PLACE = 0, B_STRIDE = 0, TERMS = 1, STEP_BYTES = BLOCK_BYTES };

#include "kernels/common/steps.h"

typedef struct weights {
    steps at;
    scaling how; /* a constant, as is what follows from it */
    __m512 table;
} weights;
typedef struct fold {
    f32v scale[2]; /* of each 16 k, or one */
} fold;

INLINE weights open_panel(const kt_dot *a, const size_t p, const scaling how) {
    return (weights){steps_of(a, p, how), how, _mm512_loadu_ps(a->codebook->value)};
}

INLINE const uint8_t *tile_at(const weights *w, const size_t step, const int n) {
    return step_of(&w->at, step) + n * SIXTEEN_BYTES;
}

INLINE fold load_fold(const weights *w, const size_t step, const int n) {
    const uint8_t *header = header_of(&w->at, step);
    const f32v first = load_scales(header, n, 0, w->how);
    return (fold){{first, w->how & HALVES ? load_scales(header, n, 1, w->how) : first}};
}

INLINE void decode_quarter(const weights *w, const fold *f, const size_t step, const int n, const int quarter, uint8_t *to) {
    /* VCVTNE2PS2BF16 leaves 16 even k, then 16 odd ones. */
    const __m512i pairs = (__m512i)(u32v){0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
                                          0x180008, 0x190009, 0x1A000A, 0x1B000B, 0x1C000C, 0x1D000D, 0x1E000E, 0x1F000F};
    const f32v scale = f->scale[quarter / 2];
    const u32v codes = load_u32(tile_at(w, step, n) + quarter * OCTET_BYTES);
    to += quarter * QUARTER_BYTES;
#pragma GCC unroll 4
    for (int pair = 0; pair < 4; pair++, to += TILE_ROW_BYTES) {
        const f32v even = (f32v)_mm512_permutexvar_ps((__m512i)(codes >> (4 * pair)), w->table) * scale;
        const f32v odd = (f32v)_mm512_permutexvar_ps((__m512i)(codes >> (4 * pair + 16)), w->table) * scale;
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
        _mm512_storeu_si512(to, _mm512_permutexvar_epi16(pairs, both));
    }
}

#include "kernels/loops/tiles.h"

FUNCTIONS(bf16, BF16 | FOLDED)
FUNCTIONS(fp16, FP16 | FOLDED)
FUNCTIONS(e4m3, E4M3 | HALVES | FOLDED)

#define Q4 .family = "q4", .folded = 1
#define PER_BLOCKS .scale_group_min = KT_BLOCK, .scale_group_max = KT_SCALE_GROUP_MAX
#define PER_16 .scale_group_min = KT_SCALE_GROUP_MIN, .scale_group_max = KT_SCALE_GROUP_MIN
const kt_kernel KT_NAME(q4_amx_products)[] = {
    {Q4, .scale = "bf16", PER_BLOCKS, SERVED_BY(bf16)},
    {Q4, .scale = "fp16", PER_BLOCKS, SERVED_BY(fp16)},
    {Q4, .scale = "e4m3", PER_16, SERVED_BY(e4m3)},
    {0},
};
