/* E4M3 as bf16, with the scale of a group folded in or none. Includers have AVX-512BW.
 *
 * A normal number's bits move by 4, and a constant makes up for the difference of exponents. The seven denormals, which VDPBF16PS and
 * TDPBF16PS would take as zero, are normal in bf16: a table has what is to be added to their bits instead. Where there is neither a
 * denormal nor a zero, each bit of the bf16 is a bit of the code or its complement: GFNI makes 64 weights of four instructions.
 */
#ifndef KT_E4M3_BF16_H
#define KT_E4M3_BF16_H

#include <immintrin.h>
#include <stdint.h>

/* What is added to the bits of a word: `normal` for normal numbers, and by VPERMW `denormal` for those of exponent 0, less
 * `lower`, saturating, so that zero stays zero. Only the first eight words of that table are looked at. */
typedef struct e4m3_to_bf16 {
    __m512i normal, denormal, lower;
} e4m3_to_bf16;

/* bf16 bits of m * 2^-9, their exponent raised, minus m << 4; 0 for m = 0. */
#define DENORMAL(bits, m, raised) (short)((bits) + ((raised) << 7) - ((m) << 4))
#define DENORMALS(raised)                                                                                                      \
    _mm512_castsi128_si512(_mm_setr_epi16(                                                                                     \
        0, DENORMAL(0x3B00, 1, raised), DENORMAL(0x3B80, 2, raised), DENORMAL(0x3BC0, 3, raised), DENORMAL(0x3C00, 4, raised), \
        DENORMAL(0x3C20, 5, raised), DENORMAL(0x3C40, 6, raised), DENORMAL(0x3C60, 7, raised)))

/* What is added where there is no scale: nothing is lower. */
static inline __attribute__((always_inline)) e4m3_to_bf16 e4m3_plain(void) {
    return (e4m3_to_bf16){_mm512_set1_epi16(120 << 7), DENORMALS(0), _mm512_setzero_si512()};
}

/* lower: (247 - b) << 7 for both words of 16 columns, whose scales are 2^(b - 127), b from 10 to 246. */
static inline __attribute__((always_inline)) e4m3_to_bf16 e4m3_folded(const __m512i lower) {
    return (e4m3_to_bf16){_mm512_sub_epi16(_mm512_set1_epi16(240 << 7), lower), DENORMALS(120), lower};
}
#undef DENORMALS
#undef DENORMAL

/* The bf16 of the upper bytes of words, or of their lower ones; folded: whether there is a scale. */
static inline __attribute__((always_inline)) __m512i e4m3_to_words(const __m512i words, const int upper, const e4m3_to_bf16 *to,
                                                                   const int folded) {
    const __m512i top = upper ? words : _mm512_slli_epi16(words, 8), index = upper ? _mm512_srli_epi16(words, 8) : words;
    const __m512i bits = _mm512_and_si512(_mm512_srai_epi16(top, 4), _mm512_set1_epi16((short)0x87F0));
    const __mmask32 small = _mm512_testn_epi16_mask(top, _mm512_set1_epi16(0x7800));
    __m512i add = _mm512_mask_permutexvar_epi16(to->normal, small, index, to->denormal);
    if (folded) add = _mm512_mask_subs_epu16(add, small, add, to->lower);
    return _mm512_add_epi16(bits, add);
}

#ifdef __GFNI__
typedef struct e4m3_words {
    __m512i lower, upper; /* bf16 of the lower and of the upper bytes of words */
} e4m3_words;

/* 64 normal numbers, without a scale. An exponent e becomes e + 120: bit 3, four times its complement, bits 2 to 0. */
static inline __attribute__((always_inline)) e4m3_words e4m3_normal_to_words(const __m512i codes) {
    const __m512i swap = _mm512_set4_epi32(0x0E0F0C0D, 0x0A0B0809, 0x06070405, 0x02030001);
    const __m512i high = _mm512_gf2p8affine_epi64_epi8(codes, _mm512_set1_epi64(0x1020404040404080), 0x3C);
    const __m512i low = _mm512_gf2p8affine_epi64_epi8(codes, _mm512_set1_epi64(0x01020408), 0);
    const __mmask64 upper = 0xAAAAAAAAAAAAAAAA;
    return (e4m3_words){_mm512_mask_shuffle_epi8(low, upper, high, swap), _mm512_mask_shuffle_epi8(high, ~upper, low, swap)};
}

/* Whether any of 64 codes is a denormal number or a zero. */
static inline __attribute__((always_inline)) int e4m3_any_small(const __m512i codes) {
    return _mm512_testn_epi8_mask(codes, _mm512_set1_epi8(0x78)) != 0;
}
#endif

#endif
