/* i8's codes as floats; pack/layout.h has the layout. */
#ifndef KT_I8_VALUES_H
#define KT_I8_VALUES_H

#include "kernels/common/byte_layout.h"

/* Two dwords' bytes are k0 k4 k1 k5 and k2 k6 k3 k7. */
INLINE int code_bit(const int b) { return b == 0 ? 1 : b == 2 ? 0 : -1; }

/* q of one byte of the dwords of 4 k, exactly. A byte at bit b of the float 2^(23 - b) adds itself, q + 128, to it; at bits 0
 * and 8 it does not reach the exponent. */
INLINE f32v i8_value(const u32v codes, const int byte) {
    const int bit = byte % 2 * 8;
    const u32v low = byte / 2 ? codes >> 16 : codes;
    return (f32v)replace_bits(low, 0xFFu << bit, (uint32_t)(127 + 23 - bit) << 23) - splat((float)(1 << (23 - bit)) + 128);
}

/* Both k of a pair as bf16: the upper half of a float is its number if that has so few bits. byte: the pair's in its words. */
INLINE u32v i8_pair(const u32v codes, const int byte) {
    return (u32v)i8_value(codes, byte) >> 16 | (u32v)i8_value(codes, byte + 2);
}

/* Where a k-pair of 8 k is: which of their two dwords has it, and which bytes of that dword's words. */
INLINE int quad_of(const int pair) { return pair % 2; }
INLINE int byte_of(const int pair) { return pair / 2; }

#endif
