/* Where q4's codes are; pack/layout.h has the picture. */
#ifndef KT_Q4_LAYOUT_H
#define KT_Q4_LAYOUT_H

#include "kernels/common/place.h"
#include "kernels/common/scales.h"

enum {
    BLOCK_BYTES = KT_PANEL * KT_BLOCK / 2,
    OCTET_BYTES = 64, /* a line: 8 k of 16 columns */
    SIXTEEN_BYTES = BLOCK_BYTES / 4,
    CODE_BITS = 4,
    ROW_BYTES = OCTET_BYTES,
    AS_PACKED = 0,
};

/* A dword's nibbles are k0 k2 k4 k6 k1 k3 k5 k7. */
INLINE int code_bit(const int b) { return b == 0 ? 2 : b == 1 ? 0 : b == 2 ? 1 : -1; }

/* The code dwords of 8 k in the columns of vector v. */
INLINE const uint8_t *codes_at(const place *p, const int v) {
    const int column = v * LANES;
    return p->block + p->octet * OCTET_BYTES + column / 16 * SIXTEEN_BYTES + column % 16 * 4;
}

#endif
