/* Packing f8, 8-bit floats: rows of bytes to panels and back, exactly.
 *
 * LAYOUT is layout.h's: a 64-byte vector holds 4 k of 16 columns, and the upper and the lower bytes of each column's two words are the
 * k-pairs (2,3) and (0,1): the pair order of VDPBF16PS and TDPBF16PS.
 */
#include "base/stream.h"
#include "ktmoe.h"
#include "pack/layout.h"
#include "pack/pack.h"
#include "pack/transpose.h"

enum { BLOCK_BYTES = KT_F8_BLOCK_BYTES, ROW_BYTES = KT_BLOCK, LINE_STEP = 64, HALF = 16 };

static inline size_t column_at(size_t column) { return kt_f8_at(column, 0); }

ALWAYS_INLINE u32x4 pack_four(const kt_format *f, const uint8_t *from, size_t stride_bytes, uint8_t *to) {
    (void)f;
    u32x4 wrong = {0};
    for (int half = 0; half < 2; half++) {
        u32x4 v[4];
        for (int i = 0; i < 4; i++) {
            memcpy(&v[i], from + i * stride_bytes + half * HALF, sizeof v[i]);
            wrong |= ((v[i] & 0x7F7F7F7F) + 0x01010101) & 0x80808080; /* E4M3's NaN, of either sign */
            v[i] = swap_middle(v[i]);
        }
        store_transposed(v, to + half * 4 * 64, 64);
    }
    return wrong;
}

ALWAYS_INLINE void unpack_four(const kt_format *f, const uint8_t *block, size_t column, uint8_t *to, size_t stride_bytes) {
    (void)f;
    const uint8_t *from = block + column_at(column);
    for (int half = 0; half < 2; half++) {
        u32x4 v[4];
        for (int j = 0; j < 4; j++) {
            memcpy(&v[j], from + (half * 4 + j) * 64, sizeof v[j]);
            v[j] = swap_middle(v[j]);
        }
        store_transposed(v, to + half * HALF, stride_bytes);
    }
}

ALWAYS_INLINE void stream_lines(const kt_format *f, uint8_t *block, size_t column, const uint8_t *lines) {
    (void)f;
    kt_stream(block + column_at(column), LINE_STEP, lines, BLOCK_BYTES / 64 * KT_LINE_COLUMNS / KT_PANEL);
}

#include "pack/panels.h"

const kt_packing kt_pack_f8 = {"f8", 0, 1, 8, BLOCK_BYTES, pack_codes, unpack_codes, unpack_row};
