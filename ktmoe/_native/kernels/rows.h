/* Rows as kernels take them: bf16 widened to fp32 once a row, so that kernels broadcast it as it is. */
#ifndef KT_ROWS_H
#define KT_ROWS_H

#include <string.h>

#include "ktmoe.h"

static void encode_f32(const uint16_t *restrict x, size_t first, size_t count, size_t k, void *restrict row) {
    (void)k;
    uint32_t *to = (uint32_t *)row + first;
    for (size_t i = 0; i < count; i++) to[i] = (uint32_t)x[i] << 16;
}

#define ROWS_F32 {.activations = "bf16", .group_bytes = KT_GROUP * sizeof(float), .encode = encode_f32}

#endif
