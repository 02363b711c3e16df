/* Packing f32, weights of 32 bits: rows of dwords to panels and back, exactly; layout.h has the layout. Padding is zero. */
#include "base/stream.h"
#include "ktmoe.h"
#include "pack/layout.h"
#include "pack/pack.h"
#include "pack/transpose.h"

enum { K_BYTES = KT_PANEL * 4, BLOCK_BYTES = KT_F32_BLOCK_BYTES, ROW_BYTES = KT_BLOCK * 4, LINE_STEP = K_BYTES };

static inline size_t column_at(size_t column) { return kt_f32_at(column, 0); }

ALWAYS_INLINE u32x4 pack_four(const kt_format *f, const uint8_t *from, size_t stride_bytes, uint8_t *to) {
    (void)f;
    u32x4 infinite = {0}; /* bit 31: an exponent of all ones was seen */
#pragma GCC unroll 1
    for (int four = 0; four < KT_BLOCK / 4; four++) {
        u32x4 v[4];
        for (int i = 0; i < 4; i++) {
            memcpy(&v[i], from + i * stride_bytes + four * sizeof v[i], sizeof v[i]);
            infinite |= (v[i] & 0x7F800000) + 0x00800000;
        }
        store_transposed(v, to + four * 4 * 64, 64);
    }
    return infinite & 0x80000000;
}

ALWAYS_INLINE void unpack_four(const kt_format *f, const uint8_t *block, size_t column, uint8_t *to, size_t stride_bytes) {
    (void)f;
    const uint8_t *from = block + column_at(column);
    for (int four = 0; four < KT_BLOCK / 4; four++) {
        u32x4 v[4];
        for (int j = 0; j < 4; j++) memcpy(&v[j], from + (four * 4 + j) * K_BYTES, sizeof v[j]);
        store_transposed(v, to + four * sizeof v[0], stride_bytes);
    }
}

ALWAYS_INLINE void stream_lines(const kt_format *f, uint8_t *block, size_t column, const uint8_t *lines) {
    (void)f;
    kt_stream(block + column_at(column), LINE_STEP, lines, BLOCK_BYTES / 64 * KT_LINE_COLUMNS / KT_PANEL);
}

#include "pack/panels.h"

const kt_packing kt_pack_f32 = {"f32", 0, 1, 32, BLOCK_BYTES, pack_codes, unpack_codes, unpack_row};
