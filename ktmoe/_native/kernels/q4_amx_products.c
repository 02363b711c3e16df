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

enum { IN_PLACE = 0, B_STRIDE = 0, STEP_BYTES = BLOCK_BYTES };

typedef struct weights {
    const uint8_t *packed;
    scaling how;     /* a constant, as is what follows from it */
    int group_shift; /* of a step, to its group */
    size_t group_bytes;
    __m512 table;
} weights;

INLINE weights open_panel(const kt_dot *a, const size_t p, const scaling how) {
    const int shift = how & HALVES ? 0 : __builtin_ctzl(a->scale_group / KT_BLOCK);
    return (weights){a->w[p], how, shift, header_bytes(how) + ((size_t)STEP_BYTES << shift),
                     _mm512_loadu_ps(a->codebook->value)};
}

INLINE const uint8_t *step_at(const weights *w, const size_t step) {
    return w->packed + step * STEP_BYTES + ((step >> w->group_shift) + 1) * header_bytes(w->how);
}

INLINE const uint8_t *tile_at(const weights *w, const size_t step, const int n) { return step_at(w, step) + n * SIXTEEN_BYTES; }

INLINE void decode_tile(const weights *w, const size_t step, const int n, uint8_t *to) {
    const uint8_t *header = w->packed + (step >> w->group_shift) * w->group_bytes;
    /* VCVTNE2PS2BF16 leaves 16 even k, then 16 odd ones. */
    const __m512i pairs = (__m512i)(u32v){0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
                                          0x180008, 0x190009, 0x1A000A, 0x1B000B, 0x1C000C, 0x1D000D, 0x1E000E, 0x1F000F};
    const uint8_t *from = tile_at(w, step, n);
    const int octets = KT_BLOCK / 8 / halves(w->how);
#pragma GCC unroll 4
    for (int octet = 0; octet < KT_BLOCK / 8; octet++, from += OCTET_BYTES, to += 4 * TILE_ROW_BYTES) {
        const f32v scale = load_scales(header, n, octet / octets, w->how);
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

FUNCTIONS(bf16, BF16)
FUNCTIONS(fp16, FP16)
FUNCTIONS(e4m3, E4M3 | HALVES)

#define Q4 .family = "q4", .folded = 1
#define PER_BLOCKS .scale_group_min = KT_BLOCK, .scale_group_max = KT_SCALE_GROUP_MAX
#define PER_16 .scale_group_min = KT_SCALE_GROUP_MIN, .scale_group_max = KT_SCALE_GROUP_MIN
const kt_kernel KT_NAME(q4_amx_products)[] = {
    {Q4, .scale = "bf16", PER_BLOCKS, SERVED_BY(bf16)},
    {Q4, .scale = "fp16", PER_BLOCKS, SERVED_BY(fp16)},
    {Q4, .scale = "e4m3", PER_16, SERVED_BY(e4m3)},
    {0},
};
