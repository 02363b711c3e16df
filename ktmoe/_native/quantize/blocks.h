/* Rounding blocks of bf16 numbers to MX formats: codes of an element, and one UE8M0 byte for each KT_BLOCK of them. */
#ifndef KT_BLOCKS_H
#define KT_BLOCKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ktmoe.h"

enum { KT_E2M1_TIES = 7, KT_NO_NUMBER = 255 };

/* One of ktmoe.quantization's rules. A block's scale is 2^e, and 2^(e + 127) its byte: e is the exponent of its largest magnitude M
 * less that of the element's largest number; one more where the last 7 bits of M are at least `up`, one less where they are below
 * `down`; -127 at least. A NaN or an infinity makes the whole block NaN, whose byte is KT_NO_NUMBER. */
typedef struct kt_block_rule {
    bool e2m1;                /* E2M1; else E4M3 */
    uint8_t up, down, zeros;  /* zeros: the byte of a block of zeros */
    bool negative_zero;       /* whether a negative number that becomes zero keeps its sign */
    bool up_at[KT_E2M1_TIES]; /* of a number half-way between two of E2M1's sizes: whether the larger one is taken */
} kt_block_rule;

/* count: a multiple of KT_BLOCK. */
void kt_blocks_round(const kt_block_rule *rule, uint16_t *x, size_t count); /* in place, to what codes and scales stand for */
/* codes: two a byte for E2M1, low nibble = even k. scales: [count / KT_BLOCK]. */
void kt_blocks_quantize(const kt_block_rule *rule, const uint16_t *x, size_t count, uint8_t *codes, uint8_t *scales);
/* What those stand for, rounded to bf16, ties to even. values: of E2M1's 16 codes or of E4M3's 256. */
void kt_blocks_values(bool e2m1, const float *values, const uint8_t *codes, const uint8_t *scales, size_t count, uint16_t *x);

#endif
