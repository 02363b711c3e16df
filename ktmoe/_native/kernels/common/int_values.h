/* Family int's codes as floats; pack/layout.h has the layout. */
#ifndef KT_INT_VALUES_H
#define KT_INT_VALUES_H

#include "kernels/common/int_layout.h"

/* A byte at bit b of the float 2^(23 - b) adds itself to it; at bits 0 and 8 it does not reach the exponent. What a float of a byte
 * at either has too much: that power of two, and the code of 0. */
typedef struct int_base {
    f32v of_bit[2];
} int_base;

INLINE int_base int_base_of(const float zero) { return (int_base){{splat(0x1p23f + zero), splat(0x1p15f + zero)}}; }

/* What one byte of the dwords of 4 k stands for, exactly. */
INLINE f32v int_value(const u32v codes, const int byte, const int_base *base, const scaling how) {
    const int bit = byte % 2 * 8;
    const u32v low = byte / 2 ? codes >> 16 : codes;
    return (f32v)replace_bits(low, code_mask(how) << bit, (uint32_t)(127 + 23 - bit) << 23) - base->of_bit[byte % 2];
}

/* Both k of a pair as bf16: the upper half of a float is its number if that has so few bits. byte: the pair's in its words. */
INLINE u32v int_pair(const u32v codes, const int byte, const int_base *base, const scaling how) {
    return (u32v)int_value(codes, byte, base, how) >> 16 | (u32v)int_value(codes, byte + 2, base, how);
}

#endif
