/* Sums of x, which minima multiply: what rows have of each 32 k behind their numbers. */
#ifndef KT_X_SUMS_H
#define KT_X_SUMS_H

#include <stdint.h>
#include <string.h>

#include "ktmoe.h"

/* The sums of x in a block, in its first 16 k and in its last. */
typedef struct x_sums {
    float of[3];
} x_sums;

/* Eight numbers apart, then four, two and one: additions that do not wait for one another. */
static inline float sum_of_16(const uint16_t *x) {
    float v[16];
    for (int i = 0; i < 16; i++) {
        const uint32_t bits = (uint32_t)x[i] << 16;
        memcpy(&v[i], &bits, sizeof bits);
    }
    for (int i = 0; i < 8; i++) v[i] += v[i + 8];
    for (int i = 0; i < 4; i++) v[i] += v[i + 4];
    return (v[0] + v[2]) + (v[1] + v[3]);
}

/* Sums up count bf16 numbers, block by block. */
static inline void sum_blocks(const uint16_t *x, const size_t count, x_sums *to) {
    for (size_t i = 0; i < count; i += KT_BLOCK, to++) {
        const float first = sum_of_16(x + i), last = sum_of_16(x + i + 16);
        *to = (x_sums){{first + last, first, last}};
    }
}

#endif
