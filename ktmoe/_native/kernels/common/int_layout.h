/* Where the codes of family int are: in one plane of bits or in two; pack/layout.h has the picture. */
#ifndef KT_INT_LAYOUT_H
#define KT_INT_LAYOUT_H

#include "kernels/common/place.h"
#include "kernels/common/scales.h"

#define SEVERAL_SIZES
enum {
    BLOCK_BYTES = KT_PANEL * KT_BLOCK, /* of codes of 8 bits, which others are widened to before they are transposed */
    PLANE_BYTES = BLOCK_BYTES / 8,     /* of each bit */
    ROW_BYTES = 64,                    /* a line: 4 k of 16 columns */
    SIXTEEN_BYTES = BLOCK_BYTES / 4,
    CODE_BITS = 8,
    AS_PACKED = 0,
};

/* Two dwords' bytes are k0 k4 k1 k5 and k2 k6 k3 k7. */
INLINE int code_bit(const int b) { return b == 0 ? 1 : b == 2 ? 0 : -1; }

/* Where a k-pair of 8 k is: which of their two dwords has it, and which bytes of that dword's words. */
INLINE int half_of(const int pair) { return pair % 2; }
INLINE int byte_of(const int pair) { return pair / 2; }

/* Of a plane, `bits` bits of each code of dword number `dword` of a block, from bit `to` of each byte up; other bits are any. */
INLINE u32v load_pieces(const uint8_t *plane, const int bits, const int dword, const int to, const int v) {
    const int column = v * LANES, down = dword * bits % 8 - to;
    const u32v line = load_u32(plane + column / 16 * LINE * bits + dword * bits / 8 * LINE + column % 16 * 4);
    return down < 0 ? line << -down : line >> down;
}

/* The codes of half of 8 k in the columns of vector v, in the lowest bits of each byte; those above are any. */
INLINE u32v load_codes(const place *p, const int v, const int half, const scaling how) {
    const int bits = bits_of_code(how), lower = bits == 8 ? 8 : bits < 4 ? 2 : 4, dword = 2 * p->octet + half;
    const u32v low = load_pieces(p->block, lower, dword, 0, v);
    if (bits == lower) return low;
    const u32v high = load_pieces(p->block + lower * PLANE_BYTES, bits - lower, dword, lower, v);
    return select_bits(((1u << lower) - 1) * 0x01010101u, low, high);
}

/* What a byte has of a code. */
INLINE uint32_t code_mask(const scaling how) { return (1u << bits_of_code(how)) - 1; }

/* A block of codes of any size, as those of 8 bits stand. Returns `to`. */
INLINE const uint8_t *widen_block(const uint8_t *block, uint8_t *restrict to, const scaling how) {
    for (int octet = 0; octet < KT_BLOCK / 8; octet++)
        for (int half = 0; half < 2; half++)
            for (int v = 0; v < VECTORS; v++) {
                const place p = {block, 0, octet};
                const u32v codes = load_codes(&p, v, half, how) & code_mask(how) * 0x01010101u;
                const int column = v * LANES;
                memcpy(to + column / 16 * SIXTEEN_BYTES + (2 * octet + half) * LINE + column % 16 * 4, &codes, sizeof codes);
            }
    return to;
}

#endif
