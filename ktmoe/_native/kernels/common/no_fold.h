/* What kernels give to panel.h whose decode() needs nothing of groups. */
#ifndef KT_NO_FOLD_H
#define KT_NO_FOLD_H

#include "kernels/common/scales.h"

typedef char fold;

INLINE u32v fold_columns(const uint8_t *header, const int v, const scaling how) {
    return (void)header, (void)v, (void)how, (u32v)splat(0);
}
INLINE fold fold_of(const u32v columns, const scaling how) { return (void)columns, (void)how, 0; }

#endif
