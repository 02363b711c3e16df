/* Packing int, integers of 2, 3, 5, 6 and 8 bits: rows of bytes, a code each, to planes of bits in panels and back, exactly.
 *
 * LAYOUT is layout.h's. VPDPBUSD takes q + 128 of 8 bits, and so does the mantissa of a float. The lower and the upper bytes of a column's
 * two words are k-pairs, the order of VDPBF16PS and TDPBF16PS. Eight k stand as q4's do, so that kernels of both families take the same
 * rows of 8-bit x.
 * REGULARITIES pieces of one plane's dwords stand at the same bits of all bytes, so four columns are shifted and masked alike.
 */
#include "base/stream.h"
#include "ktmoe.h"
#include "pack/layout.h"
#include "pack/pack.h"
#include "pack/transpose.h"

enum {
    BLOCK_BYTES = KT_INT_BIT_BYTES * 8,
    ROW_BYTES = KT_BLOCK,
    HALF = 16,
    DWORDS = 8,                                                    /* of a column and 32 k, as bytes */
    BIT_LINES = KT_INT_BIT_BYTES / 64 * KT_LINE_COLUMNS / KT_PANEL /* that 16 columns have of each bit */
};
_Static_assert(BIT_LINES == 1, "planes of b bits have b lines");

typedef uint64_t u64x2 __attribute__((vector_size(16)));

static const uint32_t EACH = 0x01010101; /* byte */

/* The bits that turn codes of 8 bits into q + 128 and back: padding is the code of 0, which is 0 or 128. */
static inline uint32_t flipped_bits(const kt_format *f, size_t bits) { return bits == 8 ? (f->padding ^ 0x80u) * EACH : 0; }

/* Words 0 1 2 3 <-> 0 2 1 3, in two qwords. */
static inline u32x4 swap_words(u32x4 dwords) {
    const u64x2 v = (u64x2)dwords;
    return (u32x4)((v & 0xFFFF00000000FFFF) | (v >> 16 & 0x00000000FFFF0000) | (v << 16 & 0x0000FFFF00000000));
}

/* A plane of so many bits of four columns, those of codes from bit `shift` up: its lines from their dwords; and back, added to these. */
ALWAYS_INLINE void dwords_to_plane(const u32x4 dwords[DWORDS], const size_t bits, const size_t shift, uint8_t *lines) {
    const uint32_t mask = ((1u << bits) - 1) * EACH;
    for (size_t line = 0, i = 0; line < bits; line++) {
        u32x4 v = {0};
        for (size_t at = 0; at < 8; at += bits, i++) v |= (dwords[i] >> (uint32_t)shift & mask) << (uint32_t)at;
        memcpy(lines + line * 64, &v, sizeof v);
    }
}
ALWAYS_INLINE void plane_to_dwords(const uint8_t *lines, const size_t bits, const size_t shift, u32x4 dwords[DWORDS]) {
    const uint32_t mask = ((1u << bits) - 1) * EACH;
    for (size_t line = 0, i = 0; line < bits; line++) {
        u32x4 v;
        memcpy(&v, lines + line * 64, sizeof v);
        for (size_t at = 0; at < 8; at += bits, i++) dwords[i] |= (v >> (uint32_t)at & mask) << (uint32_t)shift;
    }
}

ALWAYS_INLINE u32x4 pack_size(const kt_format *f, const uint8_t *from, size_t stride_bytes, uint8_t *to, const size_t bits) {
    const size_t lower = kt_int_lower_bits(bits);
    u32x4 dwords[DWORDS], all = {0};
    for (int half = 0; half < 2; half++) {
        u32x4 *v = dwords + half * 4;
        for (int i = 0; i < 4; i++) {
            memcpy(&v[i], from + i * stride_bytes + half * HALF, sizeof v[i]);
            all |= v[i];
            v[i] = swap_middle(swap_words(v[i])) ^ flipped_bits(f, bits);
        }
        transpose_four(v);
    }
    dwords_to_plane(dwords, lower, 0, to);
    if (bits > lower) dwords_to_plane(dwords, bits - lower, lower, to + lower * 64);
    return all & ~(((1u << bits) - 1) * EACH); /* a code has more bits */
}

ALWAYS_INLINE void unpack_size(const kt_format *f, const uint8_t *block, size_t column, uint8_t *to, size_t stride_bytes,
                               const size_t bits) {
    const size_t lower = kt_int_lower_bits(bits);
    u32x4 dwords[DWORDS] = {0};
    plane_to_dwords(block + kt_int_at(lower, column, 0), lower, 0, dwords);
    const uint8_t *upper = block + lower * KT_INT_BIT_BYTES;
    if (bits > lower) plane_to_dwords(upper + kt_int_at(bits - lower, column, 0), bits - lower, lower, dwords);
    for (int half = 0; half < 2; half++) {
        u32x4 v[4];
        for (int j = 0; j < 4; j += 2) { /* two dwords are 8 k of four columns: k0 k1 k4 k5 and k2 k3 k6 k7 */
            u32x4 of_half[2];
            for (int i = 0; i < 2; i++) of_half[i] = swap_middle(dwords[half * 4 + j + i]) ^ flipped_bits(f, bits);
            v[j] = (of_half[0] & 0x0000FFFF) | of_half[1] << 16;
            v[j + 1] = of_half[0] >> 16 | (of_half[1] & 0xFFFF0000);
        }
        store_transposed(v, to + half * HALF, stride_bytes);
    }
}

ALWAYS_INLINE u32x4 pack_four(const kt_format *f, const uint8_t *from, size_t stride_bytes, uint8_t *to) {
    switch (f->packing->bits) {
        case 2: return pack_size(f, from, stride_bytes, to, 2);
        case 3: return pack_size(f, from, stride_bytes, to, 3);
        case 5: return pack_size(f, from, stride_bytes, to, 5);
        case 6: return pack_size(f, from, stride_bytes, to, 6);
        default: return pack_size(f, from, stride_bytes, to, 8);
    }
}

ALWAYS_INLINE void unpack_four(const kt_format *f, const uint8_t *block, size_t column, uint8_t *to, size_t stride_bytes) {
    switch (f->packing->bits) {
        case 2: unpack_size(f, block, column, to, stride_bytes, 2); return;
        case 3: unpack_size(f, block, column, to, stride_bytes, 3); return;
        case 5: unpack_size(f, block, column, to, stride_bytes, 5); return;
        case 6: unpack_size(f, block, column, to, stride_bytes, 6); return;
        default: unpack_size(f, block, column, to, stride_bytes, 8);
    }
}

ALWAYS_INLINE void stream_lines(const kt_format *f, uint8_t *block, size_t column, const uint8_t *lines) {
    const size_t bits = f->packing->bits, lower = kt_int_lower_bits(bits);
    kt_stream(block + kt_int_at(lower, column, 0), 64, lines, lower);
    if (bits == lower) return;
    kt_stream(block + lower * KT_INT_BIT_BYTES + kt_int_at(bits - lower, column, 0), 64, lines + lower * 64, bits - lower);
}

#include "pack/panels.h"

#define OF(size) {"int", size, 1, 8, KT_INT_BIT_BYTES * (size), pack_codes, unpack_codes, unpack_row}
const kt_packing kt_pack_int2 = OF(2), kt_pack_int3 = OF(3), kt_pack_int5 = OF(5), kt_pack_int6 = OF(6), kt_pack_int8 = OF(8);
