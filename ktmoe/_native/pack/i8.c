/* Packing i8, 8-bit integers: rows of bytes to panels and back, exactly.
 *
 * LAYOUT is layout.h's. VPDPBUSD takes q + 128, and so does the mantissa of a float. The lower and the upper bytes of a column's two
 * words are k-pairs, the order of VDPBF16PS and TDPBF16PS. Eight k stand as q4's do, so that kernels of both families take the same
 * rows of 8-bit x.
 */
#include "ktmoe.h"
#include "pack/layout.h"
#include "pack/pack.h"
#include "pack/transpose.h"

enum { BLOCK_BYTES = KT_I8_BLOCK_BYTES, ROW_BYTES = KT_BLOCK, LINE_STEP = 64, HALF = 16 };

typedef uint64_t u64x2 __attribute__((vector_size(16)));

/* The bits that turn codes into q + 128 and back: padding is the code of 0, which is 0 or 128. */
static inline uint32_t flipped_bits(const kt_format *f) { return (f->padding ^ 0x80u) * 0x01010101u; }

/* Words 0 1 2 3 <-> 0 2 1 3, in two qwords. */
static inline u32x4 swap_words(u32x4 dwords) {
    const u64x2 v = (u64x2)dwords;
    return (u32x4)((v & 0xFFFF00000000FFFF) | (v >> 16 & 0x00000000FFFF0000) | (v << 16 & 0x0000FFFF00000000));
}

static inline size_t column_at(size_t column) { return kt_i8_at(column, 0); }

ALWAYS_INLINE u32x4 pack_four(const kt_format *f, const uint8_t *from, size_t stride_bytes, uint8_t *to) {
    for (int half = 0; half < 2; half++) {
        u32x4 v[4];
        for (int i = 0; i < 4; i++) {
            memcpy(&v[i], from + i * stride_bytes + half * HALF, sizeof v[i]);
            v[i] = swap_middle(swap_words(v[i])) ^ flipped_bits(f);
        }
        store_transposed(v, to + half * 4 * 64, 64);
    }
    return (u32x4){0}; /* every code is a number */
}

ALWAYS_INLINE void unpack_four(const kt_format *f, const uint8_t *from, uint8_t *to, size_t stride_bytes) {
    for (int half = 0; half < 2; half++) {
        u32x4 v[4];
        for (int j = 0; j < 4; j += 2) { /* two lines are 8 k of four columns: k0 k1 k4 k5 and k2 k3 k6 k7 */
            u32x4 lines[2];
            for (int i = 0; i < 2; i++) {
                memcpy(&lines[i], from + (half * 4 + j + i) * 64, sizeof lines[i]);
                lines[i] = swap_middle(lines[i]) ^ flipped_bits(f);
            }
            v[j] = (lines[0] & 0x0000FFFF) | lines[1] << 16;
            v[j + 1] = lines[0] >> 16 | (lines[1] & 0xFFFF0000);
        }
        store_transposed(v, to + half * HALF, stride_bytes);
    }
}

#include "pack/panels.h"

const kt_packing kt_pack_i8 = {"i8", 1, 8, BLOCK_BYTES, pack_codes, unpack_codes, unpack_row};
