/* Where panel.h finds q4's codes; pack/q4.c has the picture. */
#ifndef KT_Q4_LAYOUT_H
#define KT_Q4_LAYOUT_H

#include "kernels/common/vector.h"

enum {
    BLOCK_BYTES = KT_PANEL * KT_BLOCK / 2,
    OCTET_BYTES = 64, /* a line: 8 k of 16 columns */
    SIXTEEN_BYTES = BLOCK_BYTES / 4,
};

/* The code dwords of 8 k in the columns of vector v. */
INLINE const uint8_t *codes_at(const uint8_t *octet, const int v) {
    const int column = v * LANES;
    return octet + column / 16 * SIXTEEN_BYTES + column % 16 * 4;
}

#endif
