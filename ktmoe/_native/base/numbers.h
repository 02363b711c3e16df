/* Rounding up, and bfloat16. */
#ifndef KT_NUMBERS_H
#define KT_NUMBERS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline size_t kt_round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

static inline float kt_bf16_to_f32(uint16_t b) {
    const uint32_t bits = (uint32_t)b << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Rounds to nearest, ties to even. A NaN stays one. */
static inline uint16_t kt_bf16_from_f32(float v) {
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
    return (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? quiet : rounded);
}

#endif
