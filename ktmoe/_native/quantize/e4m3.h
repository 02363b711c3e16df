/* Rounding to E4M3. */
#ifndef KT_E4M3_H
#define KT_E4M3_H

#include "quantize/vector.h"

/* The number nearest to one that is not negative, ties to even, 448 at most; and its code. From 2^-6 on the last 20 bits of a float32
 * are rounded away; below, adding 2^14 leaves multiples of 2^-9. */
INLINE f32x4 nearest_e4m3(f32x4 any, i32x4 *code) {
    const f32x4 size = select_f32(any < 448, any, splat(448)), small = size + 0x1p14f;
    const i32x4 bits = (i32x4)size, normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF, denormal = size < 0x1p-6f;
    *code = select_i32(denormal, (i32x4)small - (i32x4)splat(0x1p14f), (normal >> 20) - (120 << 3));
    return select_f32(denormal, small - 0x1p14f, (f32x4)normal);
}

#endif
