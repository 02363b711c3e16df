/* q4 as bf16 numbers in k-pairs, by VPERMW, as panel.h's decode() gives them. */
#ifndef KT_Q4_WORDS_H
#define KT_Q4_WORDS_H

#include "kernels/common/q4_layout.h"
#include "kernels/common/ue8m0_fold.h"

typedef __m512i table;
typedef __m512i fold;

INLINE table load_table(const kt_codebook *book, const scaling how) {
    return _mm512_loadu_si512(how & FOLDED ? book->folded : how & ZERO_POINTS ? book->signed5 : book->plain);
}

/* Scales to be folded; or zero points, in both words of each column. */
INLINE u32v fold_columns(const uint8_t *header, const int v, const scaling how) {
    if (how & FOLDED) return (u32v)ue8m0_fold(header + 16 * v, 253);
    const u32v z = load_zero_points(header, v, how);
    return z | z << 16;
}
INLINE fold fold_of(const u32v columns, const scaling how) { return (void)how, (fold)columns; }

INLINE u32v decode(const place *p, const int v, const int pair, const scaling how, const table *t, const fold *f) {
    const __m512i codes = _mm512_loadu_si512(codes_at(p, v));
    __m512i index = pair ? _mm512_srli_epi16(codes, pair * 4) : codes;
    if (how & ZERO_POINTS) index = _mm512_sub_epi16(_mm512_and_si512(index, _mm512_set1_epi16(15)), *f);
    const __m512i w = _mm512_permutexvar_epi16(index, *t);
    return (u32v)(how & FOLDED ? _mm512_subs_epu16(w, *f) : w);
}

#endif
