/* A panel's groups: what stands between its blocks, for any format. layout.h has the picture. */
#ifndef KT_GROUPS_H
#define KT_GROUPS_H

#include "pack/layout.h"
#include "pack/pack.h"

typedef struct kt_groups {
    kt_layout at;
    size_t blocks;                  /* of a panel */
    size_t halves;                  /* of a block that have scales of their own: 2 for scales of 16 k, else 1 */
    size_t places[KT_GROUP_ARRAYS]; /* of an array's first row, in its header or among the super-scales */
    size_t upper_place;             /* of the upper bits of scales of 6 bits, behind the super-scales */
} kt_groups;

kt_groups kt_groups_of(const kt_format *format, size_t k);
static inline size_t kt_headers(const kt_groups *g) {
    return g->at.header_bytes ? (g->blocks + ((size_t)1 << g->at.header_shift) - 1) >> g->at.header_shift : 0;
}
static inline size_t kt_super_headers(const kt_groups *g) {
    return g->at.super_bytes ? (g->blocks + ((size_t)1 << KT_SUPER_SHIFT) - 1) >> KT_SUPER_SHIFT : 0;
}
static inline size_t kt_panel_bytes(const kt_format *format, size_t k) {
    const kt_groups g = kt_groups_of(format, k);
    return kt_super_headers(&g) * g.at.super_bytes + kt_headers(&g) * g.at.header_bytes + g.blocks * g.at.block_bytes;
}

void kt_pack_headers(const kt_shard_matrix *m, size_t panel, uint8_t *packed, kt_scan *scan);
/* So many rows of a panel's arrays of groups, from its column `first` on, dense; groups: [KT_GROUP_ARRAYS]. Where all columns share
 * numbers, their one row. */
void kt_unpack_headers(const kt_format *format, const uint8_t *packed, size_t first, size_t rows, size_t k,
                       uint8_t *const *groups);

#endif
