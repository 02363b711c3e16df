/* q4 with bf16 scales, rounded into bf16 weights where the user allows it, by TDPBF16PS; see tiles.h.
 *
 * DEFINITION  w = codebook[code] * scale, exact in fp32, rounded once to bf16, RNE; no product is denormal (codebook.py)
 * LAYOUT      pack/q4.c. A code dword holds 8 k of one column: those of pair j at bits 4 j and 4 j + 16.
 */
#include <immintrin.h>

#include "kernels/common/isa.h"
#include "kernels/common/q4_layout.h"
#include "kernels/common/tile.h"

enum { IN_PLACE = 0, B_STRIDE = 0, STEP_BYTES = BLOCK_BYTES, SCALES_BYTES = 2 * KT_PANEL };

typedef struct weights {
    const uint8_t *packed;
    int group_shift; /* of a step, to its group */
    size_t group_bytes;
    __m512 table;
} weights;

INLINE weights open_panel(const kt_dot *a, const size_t p) {
    const int shift = __builtin_ctzl(a->scale_group / KT_BLOCK);
    return (weights){a->w[p], shift, SCALES_BYTES + ((size_t)STEP_BYTES << shift), _mm512_loadu_ps(a->codebook->value)};
}

INLINE const uint8_t *step_at(const weights *w, const size_t step) {
    return w->packed + step * STEP_BYTES + ((step >> w->group_shift) + 1) * SCALES_BYTES;
}

INLINE const uint8_t *tile_at(const weights *w, const size_t step, const int n) { return step_at(w, step) + n * SIXTEEN_BYTES; }

INLINE void decode_tile(const weights *w, const size_t step, const int n, uint8_t *to) {
    const f32v scale = load_bf16(w->packed + (step >> w->group_shift) * w->group_bytes + n * 2 * 16);
    /* VCVTNE2PS2BF16 leaves 16 even k, then 16 odd ones. */
    const __m512i pairs = (__m512i)(u32v){0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
                                          0x180008, 0x190009, 0x1A000A, 0x1B000B, 0x1C000C, 0x1D000D, 0x1E000E, 0x1F000F};
    const uint8_t *from = tile_at(w, step, n);
#pragma GCC unroll 4
    for (int octet = 0; octet < KT_BLOCK / 8; octet++, from += OCTET_BYTES, to += 4 * TILE_ROW_BYTES) {
        const u32v codes = load_u32(from);
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; pair++) {
            const f32v even = (f32v)_mm512_permutexvar_ps((__m512i)(codes >> (4 * pair)), w->table) * scale;
            const f32v odd = (f32v)_mm512_permutexvar_ps((__m512i)(codes >> (4 * pair + 16)), w->table) * scale;
            const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
            _mm512_storeu_si512(to + pair * TILE_ROW_BYTES, _mm512_permutexvar_epi16(pairs, both));
        }
    }
}

#include "kernels/loops/tiles.h"

const kt_kernel KT_NAME(q4_amx_rounded)[] = {
    {ON_TILES, .family = "q4", .scale = "bf16", .scale_group_max = KT_SCALE_GROUP_MAX, .folded = 1},
    {0},
};
