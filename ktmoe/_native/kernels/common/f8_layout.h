/* Where f8's codes are; pack/layout.h has the picture. */
#ifndef KT_F8_LAYOUT_H
#define KT_F8_LAYOUT_H

#include "kernels/common/byte_layout.h"

/* A dword's bytes are k0 k2 k1 k3. */
INLINE int code_bit(const int b) { return b == 0 ? 1 : b == 1 ? 0 : -1; }

#endif
