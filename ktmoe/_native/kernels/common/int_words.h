/* Family int as bf16 numbers in k-pairs, as panel.h's decode() gives them: up to 6 bits looked up, 8 by arithmetic. */
#ifndef KT_INT_WORDS_H
#define KT_INT_WORDS_H

#include <immintrin.h>

#include "kernels/common/int_values.h"
#include "kernels/common/no_fold.h"

typedef struct table {
    __m512i words[2];
    int_base base;
} table;

INLINE table load_table(const kt_codebook *book, const scaling how) {
    (void)how;
    return (table){{_mm512_loadu_si512(book->plain), _mm512_loadu_si512(book->plain + 32)}, int_base_of((float)book->zero)};
}

/* VPERMW reads five index bits, VPERMI2W six: what stands above a code is its neighbour's, and the values repeat. */
INLINE u32v decode(const place *p, const int v, const int pair, const scaling how, const table *t, const fold *f) {
    (void)f;
    const u32v codes = load_codes(p, v, half_of(pair), how);
    if (bits_of_code(how) > 6) return int_pair(codes, byte_of(pair), &t->base, how);
    const __m512i index = byte_of(pair) ? _mm512_srli_epi16((__m512i)codes, 8) : (__m512i)codes;
    return (u32v)(bits_of_code(how) < 6 ? _mm512_permutexvar_epi16(index, t->words[0])
                                        : _mm512_permutex2var_epi16(t->words[0], index, t->words[1]));
}

#endif
