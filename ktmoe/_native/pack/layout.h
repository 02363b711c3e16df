/* Where the weights of a packed panel stand: packing writes them there, and kernels of third parties read them by this.
 *
 * LAYOUT of a panel, 64 columns of a matrix: groups in ascending k, each a header and its blocks of 32 k. A header has the scales of
 * the columns in their native bytes, then their offsets: a zero point of each column, a byte, or minima, which stand as the scales do:
 *
 *     a scale of 16 k       two rows of scales in a header, then two of offsets, and one block
 *       of 4 or 6 bits      one row of each: of a byte, the lower nibble has the lower 4 bits of the first 16 k's
 *     a scale of 32 to 128  one row of scales, then one of offsets, and as many blocks as share it
 *     one of whole panels   a line of 16 copies, fp32; longer groups likewise
 *     none                  no header
 *
 * Where there are super-scales, a row of them, then one of the offsets' super-scales, stand before the first of each 256 k's headers.
 * Then come the upper 2 bits of scales of 6 bits, which are the scale + 32: a dword of each column, the first 16 k's in the lowest
 * bits. Scales of 256 k without others stand as super-scales do.
 *
 * All of it is whole lines of 64 bytes. k is padded to 32, so that the last group may be shorter. What pads (columns beyond n, k
 * beyond the matrix) has a code of the format's choice, the scale 1 and the offset 0; x is 0 there.
 *
 * LAYOUT of a block: dwords, each of one column. Words, low to high, are pairs of k: the order of VDPBF16PS and TDPBF16PS.
 *
 *     family    a dword has                          low to high
 *     q4        8 k, nibbles                         k0 k2 k4 k6 | k1 k3 k5 k7
 *     f8        4 k, bytes                           k0 k2 | k1 k3
 *     int       4 of 8 k, bytes; the others the next k0 k4 | k1 k5, then k2 k6 | k3 k7
 *     b16, f16  2 k                                  k0 | k1
 *     f32       1 k
 *
 * A line of 64 bytes has such dwords of 16 columns. In q4, f8 and int, the lines of 16 columns stand together, in ascending k. In the
 * others the lines of a k, or of a pair of k, do.
 *
 * LAYOUT of int, integers of 2, 3, 5, 6 or 8 bits: one or two planes, the lower bits first. 2 and 3 have a plane of 2 bits, 5 and 6 one of
 * 4; what is left, 1 or 2 bits, is the other. A plane of b bits has 8 / b neighbouring dwords of the picture above in one, as pieces of b
 * bits of each of its bytes, the first in the lowest bits. So a plane of 8 bits is that picture, and one of 4 bits has q4's. Codes are the
 * checkpoint's, but those of 8 bits are q + 128, whichever element it has.
 *
 * LAYOUT of grid and ternary: records of 256 k as the checkpoint has them, scales and all, transposed: a line of 64 bytes has byte b of
 * the record of each column, in ascending b. There are no headers. Columns beyond n are zero bytes.
 */
#ifndef KT_LAYOUT_H
#define KT_LAYOUT_H

#include "ktmoe.h"

/* Bytes of a block of 32 k. */
enum {
    KT_Q4_BLOCK_BYTES = KT_PANEL * KT_BLOCK / 2,
    KT_F8_BLOCK_BYTES = KT_PANEL * KT_BLOCK,
    KT_INT_BIT_BYTES = KT_PANEL * KT_BLOCK / 8,   /* of each bit of a code */
    KT_B16_BLOCK_BYTES = KT_PANEL * KT_BLOCK * 2, /* and of f16 */
    KT_F32_BLOCK_BYTES = KT_PANEL * KT_BLOCK * 4
};

/* Columns whose dwords fill a line. */
enum { KT_LINE_COLUMNS = 16 };

/* Where in a block the dword of column c and k is, c below 64 and k below 32; and the lowest of its bits in the dword. */
static inline size_t kt_q4_at(size_t c, size_t k) { return c / 16 * 256 + k / 8 * 64 + c % 16 * 4; }
static inline int kt_q4_bit(size_t k) { return (int)(k % 8 / 2 * 4 + k % 2 * 16); }
static inline size_t kt_f8_at(size_t c, size_t k) { return c / 16 * 512 + k / 4 * 64 + c % 16 * 4; }
static inline int kt_f8_bit(size_t k) { return (int)(k % 4 / 2 * 8 + k % 2 * 16); }
/* In a plane of so many bits. */
static inline size_t kt_int_at(size_t bits, size_t c, size_t k) {
    return c / 16 * 64 * bits + (k / 8 * 2 + k % 4 / 2) * bits / 8 * 64 + c % 16 * 4;
}
static inline int kt_int_bit(size_t bits, size_t k) {
    return (int)((k / 8 * 2 + k % 4 / 2) * bits % 8 + k % 8 / 4 * 8 + k % 2 * 16);
}
/* The bits of a code's lower plane. */
static inline size_t kt_int_lower_bits(size_t bits) { return bits == 8 ? 8 : bits < 4 ? 2 : 4; }
static inline size_t kt_b16_at(size_t c, size_t k) { return k / 2 * 256 + c * 4; }
static inline int kt_b16_bit(size_t k) { return (int)(k % 2 * 16); }
static inline size_t kt_f32_at(size_t c, size_t k) { return k * 256 + c * 4; }

/* What stands between the blocks of a panel. */
typedef struct kt_layout {
    int header_shift; /* 1 << this are a header's blocks; no division, since it is asked for each block */
    size_t super_bytes, header_bytes, block_bytes; /* of the super-scales of 256 k, of a header, of a block */
} kt_layout;

enum { KT_SUPER_SHIFT = 3 }; /* of a block, to what has its super-scales */
_Static_assert(KT_BLOCK << KT_SUPER_SHIFT == KT_SUPER_GROUP, "a super-scale is of so many blocks");

static inline int kt_header_shift(size_t scale_group) {
    return scale_group < KT_BLOCK ? 0 : __builtin_ctzl(scale_group / KT_BLOCK);
}

/* Where in a panel these are: the super-scales of the number-th 256 k, a header, a block. */
static inline size_t kt_super_header_at(const kt_layout *l, size_t number) {
    const size_t block = number << KT_SUPER_SHIFT;
    return number * l->super_bytes + (block >> l->header_shift) * l->header_bytes + block * l->block_bytes;
}
static inline size_t kt_header_at(const kt_layout *l, size_t header) {
    const size_t block = header << l->header_shift;
    return ((block >> KT_SUPER_SHIFT) + 1) * l->super_bytes + header * l->header_bytes + block * l->block_bytes;
}
static inline size_t kt_block_at(const kt_layout *l, size_t block) {
    return ((block >> KT_SUPER_SHIFT) + 1) * l->super_bytes + ((block >> l->header_shift) + 1) * l->header_bytes +
           block * l->block_bytes;
}

#endif
