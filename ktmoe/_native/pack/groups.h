/* A panel's groups: what stands between its blocks.
 *
 * LAYOUT of a panel: groups in ascending k, each a header and its blocks of 32 k, which are the family's (pack/q4.c and so on).
 * A header has the scales of the panel's 64 columns in their native bytes, then a zero point of each column, a byte:
 *
 *     a scale of 16 k       two rows of scales in a header, and one block
 *     a scale of 32 to 128  one row of scales, and as many blocks as share it
 *     one of whole panels   a line of 16 copies, fp32; longer groups likewise
 *     none                  no header
 *
 * All of it is whole lines of 64 bytes. k is padded to 32, so that the last group may be shorter. What pads (columns beyond n, k
 * beyond the matrix) has a code of the format's choice, the scale 1 and the zero point 0; x is 0 there.
 */
#ifndef KT_GROUPS_H
#define KT_GROUPS_H

#include "pack/pack.h"

typedef struct kt_groups {
    size_t blocks;                    /* of a panel */
    int header_shift;                 /* 1 << this are a header's; no division, since it is asked for each block */
    size_t header_bytes, block_bytes; /* of one */
    size_t scales_bytes;              /* of a row of scales in a header */
    size_t halves;                    /* rows of scales in a header: 2 for scales of 16 k, else 1 */
} kt_groups;

kt_groups kt_groups_of(const kt_format *format, size_t k);
static inline size_t kt_headers(const kt_groups *g) {
    return g->header_bytes ? (g->blocks + ((size_t)1 << g->header_shift) - 1) >> g->header_shift : 0;
}
static inline size_t kt_header_at(const kt_groups *g, size_t header) {
    return header * (g->header_bytes + (g->block_bytes << g->header_shift));
}
static inline size_t kt_block_at(const kt_groups *g, size_t block) {
    return block * g->block_bytes + ((block >> g->header_shift) + 1) * g->header_bytes;
}
static inline size_t kt_panel_bytes(const kt_format *format, size_t k) {
    const kt_groups g = kt_groups_of(format, k);
    return g.blocks * g.block_bytes + kt_headers(&g) * g.header_bytes;
}

void kt_pack_headers(const kt_shard_matrix *m, size_t panel, uint8_t *packed, kt_scan *scan);
/* The first `rows` of a panel's scales and zero points, dense. */
void kt_unpack_headers(const kt_format *format, const uint8_t *packed, size_t rows, size_t k, uint8_t *scales,
                       uint8_t *zero_points);

#endif
