/* Where b16's weights are; pack/layout.h has the picture. */
#ifndef KT_B16_LAYOUT_H
#define KT_B16_LAYOUT_H

#include "kernels/common/place.h"
#include "kernels/common/scales.h"

enum {
    PAIR_BYTES = KT_PANEL * 4, /* two k of a panel */
    BLOCK_BYTES = KT_BLOCK / 2 * PAIR_BYTES,
    OCTET_BYTES = 4 * PAIR_BYTES,
    CODE_BITS = 16,
    ROW_BYTES = PAIR_BYTES,
    SIXTEEN_BYTES = 16 * 4,
};

INLINE int code_bit(const int b) { return b == 0 ? 0 : -1; }

/* A k-pair of 8 k in the columns of vector v. */
INLINE const uint8_t *pair_at(const place *p, const int v, const int pair) {
    return p->block + p->octet * OCTET_BYTES + pair * PAIR_BYTES + v * LANES * 4;
}

#endif
