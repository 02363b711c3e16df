/* Packing floats of 16 bits: rows of words to panels and back, exactly; layout.h has the layout. Padding is zero. A packing file
 * defines EXPONENT, the bits of a number's exponent, before it includes this: with all of them set, it is no real number.
 */
#ifndef KT_WORDS_H
#define KT_WORDS_H

#include "base/stream.h"
#include "ktmoe.h"
#include "pack/layout.h"
#include "pack/pack.h"
#include "pack/transpose.h"

enum { PAIR_BYTES = KT_PANEL * 4, BLOCK_BYTES = KT_B16_BLOCK_BYTES, ROW_BYTES = KT_BLOCK * 2, LINE_STEP = PAIR_BYTES };

/* The exponent of both words of a dword, and the lowest bit of each. */
static const uint32_t ALL = EXPONENT * 0x10001u, LEAST = (EXPONENT & -EXPONENT) * 0x10001u;

static inline size_t column_at(size_t column) { return kt_b16_at(column, 0); }

ALWAYS_INLINE u32x4 pack_four(const kt_format *f, const uint8_t *from, size_t stride_bytes, uint8_t *to) {
    (void)f;
    u32x4 infinite = {0}; /* bits 15 and 31: an exponent of all ones was seen */
    /* Unrolled, GCC checks at the end and keeps rows on the stack until then: 0.7 of the speed. */
#pragma GCC unroll 1
    for (int four = 0; four < 4; four++) {
        u32x4 v[4];
        for (int i = 0; i < 4; i++) {
            memcpy(&v[i], from + i * stride_bytes + four * sizeof v[i], sizeof v[i]);
            infinite |= (v[i] & ALL) + LEAST;
        }
        store_transposed(v, to + four * 4 * 64, 64);
    }
    return infinite & 0x80008000;
}

ALWAYS_INLINE void unpack_four(const kt_format *f, const uint8_t *block, size_t column, uint8_t *to, size_t stride_bytes) {
    (void)f;
    const uint8_t *from = block + column_at(column);
    for (int four = 0; four < 4; four++) {
        u32x4 v[4];
        for (int j = 0; j < 4; j++) memcpy(&v[j], from + (four * 4 + j) * PAIR_BYTES, sizeof v[j]);
        store_transposed(v, to + four * sizeof v[0], stride_bytes);
    }
}

ALWAYS_INLINE void stream_lines(const kt_format *f, uint8_t *block, size_t column, const uint8_t *lines) {
    (void)f;
    kt_stream(block + column_at(column), LINE_STEP, lines, BLOCK_BYTES / 64 * KT_LINE_COLUMNS / KT_PANEL);
}

#include "pack/panels.h"

#endif
