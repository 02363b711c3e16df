/* A panel's headers: where they stand, and what they have, with super-scales multiplied in. Includers have BLOCK_BYTES. */
#ifndef KT_HEADERS_H
#define KT_HEADERS_H

#include "kernels/common/scales.h"

/* The bytes of a block. BLOCK_BYTES is of codes of 8 bits where a family has several sizes. */
#ifdef SEVERAL_SIZES
INLINE size_t block_bytes(const scaling how) { return BLOCK_BYTES / 8 * (size_t)bits_of_code(how); }
#else
INLINE size_t block_bytes(const scaling how) { return (void)how, BLOCK_BYTES; }
#endif

/* Blocks behind one header. Without scales there is none, and any number will do. */
INLINE size_t blocks_per_header(const size_t scale_group, const scaling how) {
    if (kind_of(how) == NONE) return KT_SUPER_GROUP / KT_BLOCK;
    return kind_of(how) == UE8M0 || how & (HALVES | MINIMA | SUPER) ? 1 : scale_group / KT_BLOCK;
}

/* The bytes of a panel's first blocks: all that stands before the next block's header, or before its super-scales. */
INLINE size_t packed_bytes(const size_t blocks, const size_t per, const scaling how) {
    return (blocks * KT_BLOCK + KT_SUPER_GROUP - 1) / KT_SUPER_GROUP * super_bytes(how) +
           (blocks + per - 1) / per * header_bytes(how) + blocks * block_bytes(how);
}

/* Decodes scales and minima of a group, of one or both halves of its blocks. number: of the group's first block. */
INLINE void decode_header(const uint8_t *header, const uint8_t *super, const size_t number, float scale[][KT_PANEL],
                          float minimum[][KT_PANEL], const scaling how) {
    for (int v = 0; v < VECTORS; v++) {
        supers s = {0};
        if (how & SUPER) s = load_supers(super, v, how);
        for (int half = 0; half < halves(how); half++) {
            const in_group at = {half, number % (KT_SUPER_GROUP / KT_BLOCK)};
            store_f32(scale[half] + v * LANES, load_scale(header, v, at, &s, how));
            if (how & MINIMA) store_f32(minimum[half] + v * LANES, load_minimum(header, v, at, &s, how));
        }
    }
}

#endif
