/* Nibbles of q4's codes as what VPERMW takes for indices. Includers have AVX512_VBMI. */
#ifndef KT_NIBBLES_H
#define KT_NIBBLES_H

#include <immintrin.h>

/* The nibbles of a k-pair of 8 k, at the bottom of both words of each of 16 columns; above them stand their neighbours.
 * VPMULTISHIFTQB and not a word shift: word shifts, VPSUBUSW and VPERMW want one port (docs/notes). */
static inline __attribute__((always_inline)) __m512i nibbles_of(const __m512i codes, const int pair) {
    const __m512i bytes = _mm512_set1_epi64(0x3830282018100800); /* bit offsets of a qword's bytes */
    return pair ? _mm512_multishift_epi64_epi8(_mm512_add_epi8(bytes, _mm512_set1_epi8((char)(4 * pair))), codes) : codes;
}

#endif
