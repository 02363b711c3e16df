/* Packing q4, 4-bit codes: rows of codes, low nibble = even k, to panels and back, exactly.
 *
 * LAYOUT is layout.h's: a 64-byte vector holds 8 k of 16 columns, and its words shifted right by 0, 4, 8, 12 hold the k-pairs (0,1),
 * (2,3), (4,5), (6,7) in the low bits of each column's two words: the pair order of VDPBF16PS and TDPBF16PS.
 */
#include "base/stream.h"
#include "ktmoe.h"
#include "pack/layout.h"
#include "pack/pack.h"
#include "pack/transpose.h"

enum { BLOCK_BYTES = KT_Q4_BLOCK_BYTES, ROW_BYTES = KT_BLOCK / 2, LINE_STEP = 64 };

/* Reorders each dword of two rows, from the lowest nibble up: k0 k1 .. k7 -> k0 k2 k4 k6 k1 k3 k5 k7. The rows' even bytes have
 * k0 k1 k4 k5, their odd bytes the others; these change nibbles, and then words alternate. */
static inline void split_pairs(u32x4 two[2]) {
    const u8x16 a = (u8x16)two[0], b = (u8x16)two[1];
    u32x4 even = (u32x4)SHUFFLE(u8x16, a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    u32x4 odd = (u32x4)SHUFFLE(u8x16, a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    const u32x4 changed = (even >> 4 ^ odd) & 0x0F0F0F0F;
    even ^= changed << 4, odd ^= changed;
    two[0] = (u32x4)FIRST_WORDS((u16x8)even, (u16x8)odd), two[1] = (u32x4)SECOND_WORDS((u16x8)even, (u16x8)odd);
}

static inline u32x4 join_pairs(u32x4 v) { return swap_bits(swap_middle(v), 0x00F000F0, 4); }

static inline size_t column_at(size_t column) { return kt_q4_at(column, 0); }

ALWAYS_INLINE u32x4 pack_four(const kt_format *f, const uint8_t *from, size_t stride_bytes, uint8_t *to) {
    (void)f;
    u32x4 v[4];
    for (int i = 0; i < 4; i++) memcpy(&v[i], from + i * stride_bytes, sizeof v[i]);
    split_pairs(v), split_pairs(v + 2);
    store_transposed(v, to, 64);
    return (u32x4){0}; /* every code is a number */
}

ALWAYS_INLINE void unpack_four(const kt_format *f, const uint8_t *block, size_t column, uint8_t *to, size_t stride_bytes) {
    (void)f;
    const uint8_t *from = block + column_at(column);
    u32x4 v[4];
    for (int j = 0; j < 4; j++) {
        memcpy(&v[j], from + j * 64, sizeof v[j]);
        v[j] = join_pairs(v[j]);
    }
    store_transposed(v, to, stride_bytes);
}

ALWAYS_INLINE void stream_lines(const kt_format *f, uint8_t *block, size_t column, const uint8_t *lines) {
    (void)f;
    kt_stream(block + column_at(column), LINE_STEP, lines, BLOCK_BYTES / 64 * KT_LINE_COLUMNS / KT_PANEL);
}

#include "pack/panels.h"

const kt_packing kt_pack_q4 = {"q4", 0, 1, 4, BLOCK_BYTES, pack_codes, unpack_codes, unpack_row};
