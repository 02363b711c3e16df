/* A panel's groups: what stands between its blocks.
 *
 * LAYOUT of a panel: groups in ascending k, each a header and its blocks of 32 k, which are the family's (pack/q4.c and so on).
 * A header has the scales of the panel's 64 columns in their native bytes, then their offsets: a zero point of each column, a byte,
 * or minima, which stand as the scales do:
 *
 *     a scale of 16 k       two rows of scales in a header, then two of offsets, and one block
 *     a scale of 32 to 128  one row of scales, then one of offsets, and as many blocks as share it
 *     one of whole panels   a line of 16 copies, fp32; longer groups likewise
 *     none                  no header
 *
 * Where there are super-scales, a row of them, then one of the offsets' super-scales, stand before the first of each 256 k's headers.
 *
 * All of it is whole lines of 64 bytes. k is padded to 32, so that the last group may be shorter. What pads (columns beyond n, k
 * beyond the matrix) has a code of the format's choice, the scale 1 and the offset 0; x is 0 there.
 */
#ifndef KT_GROUPS_H
#define KT_GROUPS_H

#include "ktmoe.h"
#include "pack/pack.h"

typedef struct kt_groups {
    size_t blocks;                                 /* of a panel */
    int header_shift;                              /* 1 << this are a header's; no division, since it is asked for each block */
    size_t super_bytes, header_bytes, block_bytes; /* of the super-scales of 256 k, of a header, of a block */
    size_t halves;                                 /* rows of scales in a header: 2 for scales of 16 k, else 1 */
    size_t places[KT_GROUP_ARRAYS];                /* of an array's first row, in its header or among the super-scales */
} kt_groups;

enum { KT_SUPER_SHIFT = 3 }; /* of a block, to what has its super-scales */
_Static_assert(KT_BLOCK << KT_SUPER_SHIFT == KT_SUPER_GROUP, "a super-scale is of so many blocks");

kt_groups kt_groups_of(const kt_format *format, size_t k);
static inline size_t kt_headers(const kt_groups *g) {
    return g->header_bytes ? (g->blocks + ((size_t)1 << g->header_shift) - 1) >> g->header_shift : 0;
}
static inline size_t kt_super_headers(const kt_groups *g) {
    return g->super_bytes ? (g->blocks + ((size_t)1 << KT_SUPER_SHIFT) - 1) >> KT_SUPER_SHIFT : 0;
}
static inline size_t kt_super_header_at(const kt_groups *g, size_t number) {
    const size_t block = number << KT_SUPER_SHIFT;
    return number * g->super_bytes + (block >> g->header_shift) * g->header_bytes + block * g->block_bytes;
}
static inline size_t kt_header_at(const kt_groups *g, size_t header) {
    const size_t block = header << g->header_shift;
    return ((block >> KT_SUPER_SHIFT) + 1) * g->super_bytes + header * g->header_bytes + block * g->block_bytes;
}
static inline size_t kt_block_at(const kt_groups *g, size_t block) {
    return ((block >> KT_SUPER_SHIFT) + 1) * g->super_bytes + ((block >> g->header_shift) + 1) * g->header_bytes +
           block * g->block_bytes;
}
static inline size_t kt_panel_bytes(const kt_format *format, size_t k) {
    const kt_groups g = kt_groups_of(format, k);
    return kt_super_headers(&g) * g.super_bytes + kt_headers(&g) * g.header_bytes + g.blocks * g.block_bytes;
}

void kt_pack_headers(const kt_shard_matrix *m, size_t panel, uint8_t *packed, kt_scan *scan);
/* The first `rows` of a panel's arrays of groups, dense; groups: [KT_GROUP_ARRAYS]. */
void kt_unpack_headers(const kt_format *format, const uint8_t *packed, size_t rows, size_t k, uint8_t *const *groups);

#endif
