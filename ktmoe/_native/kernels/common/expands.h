/* What panel.h and transposed.h call where nothing expands. Kernels of records define EXPANDS, and what is here, before these. */
#ifndef KT_EXPANDS_H
#define KT_EXPANDS_H

#include "kernels/common/scales.h"

#ifndef EXPANDS
#define EXPANDS 0
enum { EXPANDED_BYTES = 1, RECORD_BLOCKS = 1 };
INLINE void expand(const kt_codebook *book, const uint8_t *panel, const size_t number, const size_t count, uint8_t *to,
                   const scaling how) {
    (void)book, (void)panel, (void)number, (void)count, (void)to, (void)how;
}
#endif

#endif
