/* Where f8's codes are; pack/layout.h has the picture. */
#ifndef KT_F8_LAYOUT_H
#define KT_F8_LAYOUT_H

#include "kernels/common/place.h"
#include "kernels/common/scales.h"

enum {
    BLOCK_BYTES = KT_PANEL * KT_BLOCK,
    QUAD_BYTES = 64, /* a line: 4 k of 16 columns */
    OCTET_BYTES = 2 * QUAD_BYTES,
    SIXTEEN_BYTES = BLOCK_BYTES / 4,
    CODE_BITS = 8,
    ROW_BYTES = QUAD_BYTES,
    AS_PACKED = 0,
};

/* The code dwords of 4 k in the columns of vector v; quad: which of an octet's two. */
INLINE const uint8_t *quad_at(const place *p, const int v, const int quad) {
    const int column = v * LANES;
    return p->block + p->octet * OCTET_BYTES + column / 16 * SIXTEEN_BYTES + quad * QUAD_BYTES + column % 16 * 4;
}

/* A dword's bytes are k0 k2 k1 k3. */
INLINE int code_bit(const int b) { return b == 0 ? 1 : b == 1 ? 0 : -1; }

#endif
