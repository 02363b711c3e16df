/* E4M3 as bf16 numbers in k-pairs, as panel.h's decode() gives them. */
#ifndef KT_F8_WORDS_H
#define KT_F8_WORDS_H

#include "kernels/common/e4m3_bf16.h"
#include "kernels/common/f8_layout.h"
#include "kernels/common/ue8m0_fold.h"

typedef e4m3_to_bf16 table;
typedef e4m3_to_bf16 fold;

INLINE table load_table(const kt_codebook *book, const scaling how) { return (void)book, (void)how, e4m3_plain(); }
INLINE u32v fold_columns(const uint8_t *header, const int v, const scaling how) {
    return (void)how, (u32v)ue8m0_fold(header + 16 * v, 247);
}
INLINE fold fold_of(const u32v columns, const scaling how) { return (void)how, e4m3_folded((__m512i)columns); }

INLINE u32v decode(const place *p, const int v, const int pair, const scaling how, const table *t, const fold *f) {
    const __m512i codes = _mm512_loadu_si512(quad_at(p, v, pair / 2));
    return (u32v)e4m3_to_words(codes, pair % 2, how & FOLDED ? f : t, how & FOLDED);
}

#endif
