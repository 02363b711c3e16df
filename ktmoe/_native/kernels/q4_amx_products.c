/* q4 with scales that are no powers of two, multiplied into bf16 weights, by TDPBF16PS; see tiles.h.
 *
 * DEFINITION  w = codebook[code] * scale, exact in fp32, rounded once to bf16, RNE. With E2M1 and E4M3 scales there is nothing to
 *             round, nor, as a rule, to multiply; with bf16 and fp16 scales the user allows it. No product is denormal (folding.py)
 * LAYOUT      pack/layout.h. A code dword holds 8 k of one column: those of pair j at bits 4 j and 4 j + 16.
 */
#include <immintrin.h>

#include "kernels/common/isa.h"
#include "kernels/common/q4_words.h"
#include "kernels/common/tile.h"

enum { IN_PLACE = 0, STEP_K = 2, B_STRIDE = 0, TERMS = 1, STEP_BYTES = BLOCK_BYTES };

#include "kernels/common/steps.h"

typedef struct weights {
    steps at;
    scaling how; /* a constant, as is what follows from it */
    const kt_codebook *codebook;
    __m512 table;
    __m512i high, low; /* bytes of words, for each code: see bits_of() */
    int bits;          /* whether that serves: all values are 0, or 1 or 1.5 times powers of two */
} weights;
typedef struct tile_fold {
    f32v scale;
    int bits;                       /* whether bits_of() serves the tile; then, for each 16 k, both k of a column: */
    __m512i lower[2], mantissas[2]; /* what is subtracted; the exponent's last bit and the mantissa of 1.5 times the scale */
} tile_fold;

/* bf16 of |value| with its mantissa away and its exponent RAISED, so that unsigned saturation keeps zero at zero. */
enum { RAISED = 126 << 7, LARGEST = 129 << 7 };

INLINE weights open_panel(const kt_dot *a, const size_t p, const scaling how) {
    weights w = {.at = steps_of(a, p, how), .how = how, .codebook = a->codebook, .table = _mm512_loadu_ps(a->codebook->value)};
    if (kind_of(how) != E4M3) return w;
    const __m256i words = _mm256_loadu_si256((const __m256i *)a->codebook->plain);
    const __m256i size = _mm256_and_si256(words, _mm256_set1_epi16(0x7FFF));
    const __mmask16 some = _mm256_test_epi16_mask(size, size), half = _mm256_test_epi16_mask(size, _mm256_set1_epi16(0x40));
    w.bits = !_mm256_test_epi16_mask(size, _mm256_set1_epi16(0x3F)) &&
             !_mm256_cmpgt_epi16_mask(size, _mm256_set1_epi16(LARGEST + 0x40));
    const __m256i cut = _mm256_and_si256(words, _mm256_set1_epi16((short)0xFF80));
    const __m256i raised = _mm256_maskz_add_epi16(some, cut, _mm256_set1_epi16(RAISED));
    const __m256i filled = _mm256_or_si256(raised, _mm256_maskz_set1_epi16(half, 0x7F));
    w.high = _mm512_broadcast_i32x4(_mm256_cvtepi16_epi8(_mm256_srli_epi16(raised, 8)));
    w.low = _mm512_broadcast_i32x4(_mm256_cvtepi16_epi8(filled));
    return w;
}

INLINE const uint8_t *tile_at(const weights *w, const size_t step, const int n) {
    return step_of(&w->at, step) + n * SIXTEEN_BYTES;
}

/* 16 E4M3 scales, each in all bytes of its column. */
INLINE __m512i spread_e4m3(const uint8_t *scales) {
#define LANE(i) (i) * 0x01010101
    const __m512i spread = _mm512_setr_epi32(LANE(0), LANE(1), LANE(2), LANE(3), LANE(4), LANE(5), LANE(6), LANE(7), LANE(8),
                                             LANE(9), LANE(10), LANE(11), LANE(12), LANE(13), LANE(14), LANE(15));
#undef LANE
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)scales)), spread);
}

/* `lower` of E4M3 scales that are positive and normal: the bf16 of a scale s has the bits 16 byte + (120 << 7). */
INLINE __m512i lower_e4m3(const __m512i scales) {
    return _mm512_sub_epi16(_mm512_set1_epi16(RAISED + ((127 - 120) << 7)),
                            _mm512_maddubs_epi16(scales, _mm512_set1_epi16(16)));
}

/* The bits that 1.5 s has more than a scale s: the three bits of s's mantissa say how many. */
INLINE __m512i mantissas_e4m3(const __m512i scales) {
#define MORE(m) (char)(0x80 | ((m) < 3 ? 64 + 8 * (m) : 96 - 4 * (m)))
#define EIGHT MORE(0), MORE(1), MORE(2), MORE(3), MORE(4), MORE(5), MORE(6), MORE(7)
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_setr_epi8(EIGHT, EIGHT)), scales);
#undef EIGHT
#undef MORE
}

INLINE tile_fold load_tile_fold(const weights *w, const size_t step, const int n) {
    const uint8_t *header = header_of(&w->at, step);
    if (kind_of(w->how) != E4M3) return (tile_fold){.scale = load_scale(header, n, (in_group){0}, NULL, w->how)};
    const __m512i first = spread_e4m3(header + 16 * n), second = spread_e4m3(header + KT_PANEL + 16 * n);
    return (tile_fold){
        .bits = w->bits && !_mm512_cmplt_epi8_mask(_mm512_min_epi8(first, second), _mm512_set1_epi8(8)),
        .lower = {lower_e4m3(first), lower_e4m3(second)},
        .mantissas = {mantissas_e4m3(first), mantissas_e4m3(second)},
    };
}

/* Weights in the general way: products in fp32. */
INLINE void products_of(const u32v codes, const __m512 table, const f32v scale, uint8_t *to) {
    /* VCVTNE2PS2BF16 leaves 16 even k, then 16 odd ones. */
    const __m512i pairs = (__m512i)(u32v){0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
                                          0x180008, 0x190009, 0x1A000A, 0x1B000B, 0x1C000C, 0x1D000D, 0x1E000E, 0x1F000F};
#pragma GCC unroll 4
    for (int pair = 0; pair < 4; pair++, to += TILE_ROW_BYTES) {
        const f32v even = (f32v)_mm512_permutexvar_ps((__m512i)(codes >> (4 * pair)), table) * scale;
        const f32v odd = (f32v)_mm512_permutexvar_ps((__m512i)(codes >> (4 * pair + 16)), table) * scale;
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
        _mm512_storeu_si512(to, _mm512_permutexvar_epi16(pairs, both));
    }
}

/* This function is apart, so that what is seldom needed takes no registers. */
static __attribute__((noinline, cold)) void products_e4m3(const uint8_t *from, const kt_codebook *codebook,
                                                          const uint8_t *scales, uint8_t *to) {
    products_of(load_u32(from), _mm512_loadu_ps(codebook->value), e4m3_at_top(widen_u8(scales) << 24), to);
}

/* Weights without a multiplication: VPERMB, which reads six index bits, the upper two of them the neighbour's, gives the bytes of
 * sign and raised exponent. The mantissa is that of the scale, or of 1.5 times the scale, whose difference is ANDed in. */
INLINE void bits_of(const __m512i codes, const weights *w, const __m512i lower, const __m512i mantissas, uint8_t *to) {
    const __m512i swap = _mm512_set4_epi32(0x0E0F0C0D, 0x0A0B0809, 0x06070405, 0x02030001);
    const __mmask64 upper = 0xAAAAAAAAAAAAAAAA;
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++, to += TILE_ROW_BYTES) { /* bytes of a code dword: k0 k4 k1 k5, then k2 k6 k3 k7 */
        const __m512i index = i ? _mm512_srli_epi16(codes, 4) : codes;
        const __m512i high = _mm512_permutexvar_epi8(index, w->high);
        const __m512i low = _mm512_and_si512(_mm512_permutexvar_epi8(index, w->low), mantissas);
        const __m512i near = _mm512_mask_shuffle_epi8(low, upper, high, swap);
        const __m512i far = _mm512_mask_shuffle_epi8(high, ~upper, low, swap);
        _mm512_storeu_si512(to, _mm512_subs_epu16(near, lower));
        _mm512_storeu_si512(to + 2 * TILE_ROW_BYTES, _mm512_subs_epu16(far, lower));
    }
}

INLINE void decode_quarter(const weights *w, const tile_fold *f, const size_t step, const int n, const int quarter,
                           uint8_t *to) {
    const uint8_t *from = tile_at(w, step, n) + quarter * OCTET_BYTES;
    to += quarter * QUARTER_BYTES;
    if (kind_of(w->how) != E4M3)
        products_of(load_u32(from), w->table, f->scale, to);
    else if (__builtin_expect(f->bits, 1))
        bits_of(_mm512_loadu_si512(from), w, f->lower[quarter / 2], f->mantissas[quarter / 2], to);
    else
        products_e4m3(from, w->codebook, header_of(&w->at, step) + quarter / 2 * KT_PANEL + 16 * n, to);
}

#define OPERAND_OF(how) AS_ROUNDED
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
