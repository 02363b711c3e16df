/* i8 as bf16 numbers in k-pairs, as panel.h's decode() gives them. */
#ifndef KT_I8_WORDS_H
#define KT_I8_WORDS_H

#include "kernels/common/i8_values.h"
#include "kernels/common/no_fold.h"

INLINE u32v decode(const place *p, const int v, const int pair, const scaling how, const table *t, const fold *f) {
    (void)how, (void)t, (void)f;
    return i8_pair(load_u32(quad_at(p, v, quad_of(pair))), byte_of(pair));
}

#endif
