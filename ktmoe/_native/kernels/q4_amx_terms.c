/* q4 with bf16 scales, exactly, by TDPBF16PS: each weight is the sum of two bf16 numbers; see tiles.h.
 *
 * DEFINITION  w = high * scale + low * scale, where codebook[code] = high + low are signed powers of two or zero (folding.py): so a
 *             product has the scale's bits with another exponent. Scales are positive, or 0; no product is denormal
 * LAYOUT      pack/layout.h. A vector of codes is 8 k of 16 columns; words moved down by 0, 4, 8, 12 and VPERMW give the k-pairs.
 */
#include <immintrin.h>

#include "kernels/common/isa.h"
#include "kernels/common/nibbles.h"
#include "kernels/common/q4_words.h"
#include "kernels/common/tile.h"

enum { IN_PLACE = 0, STEP_K = 2, B_STRIDE = 0, TERMS = 2, STEP_BYTES = BLOCK_BYTES };

#include "kernels/common/steps.h"

/* RAISED is what raises the bits of a table's powers of two, signs apart. ONE is what 1 becomes by that, and the most that a
 * scale's bits may be. Less (ONE - scale's bits), saturating, a power of two is its product with the scale, and zero is
 * zero. */
enum { RAISED = 125 << 7, ONE = (127 << 7) + RAISED };

typedef struct weights {
    steps at;
    __m512i high, low; /* VPERMW reads five index bits, and the fifth is the neighbour's: 16 words twice */
} weights;
typedef __m512i tile_fold;

INLINE __m512i table_of(const __m512 powers) {
    const __m512i bits = _mm512_srli_epi32(_mm512_castps_si512(powers), 16);
    const __mmask16 some = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x7FFF));
    const __m256i words = _mm512_cvtepi32_epi16(_mm512_maskz_add_epi32(some, bits, _mm512_set1_epi32(RAISED)));
    return _mm512_broadcast_i64x4(words);
}

INLINE weights open_panel(const kt_dot *a, const size_t p, const scaling how) {
    const __m512i exponent = _mm512_set1_epi32((int)0xFF800000), mantissa = _mm512_set1_epi32(0x007FFFFF);
    const __m512 value = _mm512_loadu_ps(a->codebook->value);
    /* The power of two below a value; twice that, where what is left is none: 7 = 8 - 1. */
    __m512 high = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(value), exponent));
    __m512 low = _mm512_sub_ps(value, high);
    const __mmask16 above = _mm512_test_epi32_mask(_mm512_castps_si512(low), mantissa);
    high = _mm512_mask_add_ps(high, above, high, high);
    low = _mm512_sub_ps(value, high);
    return (weights){steps_of(a, p, how), table_of(high), table_of(low)};
}

INLINE const uint8_t *tile_at(const weights *w, const size_t step, const int n) {
    return step_of(&w->at, step) + n * SIXTEEN_BYTES;
}

/* What is subtracted from both words of each of 16 columns; all bits for a scale of 0, so that nothing is left. */
INLINE tile_fold load_tile_fold(const weights *w, const size_t step, const int n) {
    const __m512i spread = _mm512_set_epi32(0xF000F, 0xE000E, 0xD000D, 0xC000C, 0xB000B, 0xA000A, 0x90009, 0x80008, 0x70007,
                                            0x60006, 0x50005, 0x40004, 0x30003, 0x20002, 0x10001, 0x00000);
    const __m256i scales = _mm256_loadu_si256((const __m256i *)(header_of(&w->at, step) + 32 * n));
    const __m512i both = _mm512_permutexvar_epi16(spread, _mm512_castsi256_si512(scales));
    const __mmask32 some = _mm512_test_epi16_mask(both, both);
    return _mm512_mask_sub_epi16(_mm512_set1_epi16(-1), some, _mm512_set1_epi16(ONE), both);
}

INLINE void decode_quarter(const weights *w, const tile_fold *f, const size_t step, const int n, const int quarter,
                           uint8_t *to) {
    const __m512i codes = _mm512_loadu_si512(tile_at(w, step, n) + quarter * OCTET_BYTES);
    to += quarter * QUARTER_BYTES;
#pragma GCC unroll 4
    for (int pair = 0; pair < 4; pair++, to += TILE_ROW_BYTES) {
        const __m512i down = nibbles_of(codes, pair);
        _mm512_storeu_si512(to, _mm512_subs_epu16(_mm512_permutexvar_epi16(down, w->high), *f));
        _mm512_storeu_si512(to + TILE_BYTES, _mm512_subs_epu16(_mm512_permutexvar_epi16(down, w->low), *f));
    }
}

#define OPERAND_OF(how) AS_SPLIT
#include "kernels/loops/tiles.h"

FUNCTIONS(bf16, BF16 | FOLDED)

const kt_kernel KT_NAME(q4_amx_terms)[] = {
    {.family = "q4",
     .scale = "bf16",
     .scale_group_min = KT_BLOCK,
     .scale_group_max = KT_SCALE_GROUP_MAX,
     .folded = 2,
     .tuned_for = "prefill",
     SERVED_BY(bf16)},
    {0},
};
