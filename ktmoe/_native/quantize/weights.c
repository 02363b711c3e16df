#include "quantize/weights.h"

#include <string.h>

#include "base/numbers.h"

void kt_spread(const float *of_groups, size_t columns, size_t first, size_t count, float rest, float out[KT_CHUNK]) {
    size_t group = first / columns, end = (group + 1) * columns - first;
    for (size_t i = 0; i < count; group++, end += columns) {
        const size_t stop = end < count ? end : count;
        const float of_group = of_groups[group];
        for (; i < stop; i++) out[i] = of_group;
    }
    for (size_t i = count; i < KT_CHUNK; i++) out[i] = rest;
}

void kt_spread_f64(const double *of_groups, size_t columns, size_t first, size_t count, double out[KT_CHUNK]) {
    size_t group = first / columns, end = (group + 1) * columns - first;
    for (size_t i = 0; i < count; group++, end += columns) {
        const size_t stop = end < count ? end : count;
        const double of_group = of_groups[group];
        for (; i < stop; i++) out[i] = of_group;
    }
    for (size_t i = count; i < KT_CHUNK; i++) out[i] = 0;
}

static void read_bf16(const uint8_t *codes, size_t count, float *restrict w) {
    uint16_t bits[KT_CHUNK];
    memcpy(bits, codes, 2 * count);
    for (size_t i = 0; i < count; i++) w[i] = kt_bf16_to_f32(bits[i]);
}

/* The bits that fp16 and float32 share, moved to their places, are the number times 2^-112; infinite and NaN stay so. */
static void read_fp16(const uint8_t *codes, size_t count, float *restrict w) {
    uint16_t bits[KT_CHUNK];
    memcpy(bits, codes, 2 * count);
    for (size_t i = 0; i < count; i++) {
        const uint32_t special = (bits[i] & 0x7C00) == 0x7C00 ? 0x7F800000 : 0;
        const uint32_t low = (uint32_t)(bits[i] & 0x7FFF) << 13, sign = (uint32_t)(bits[i] & 0x8000) << 16;
        float number;
        memcpy(&number, &low, sizeof number);
        number *= 0x1p112f;
        uint32_t whole;
        memcpy(&whole, &number, sizeof whole);
        whole |= sign | special;
        memcpy(&w[i], &whole, sizeof whole);
    }
}

static void read_codes(const kt_weights *m, size_t row, size_t first, size_t count, float *restrict w) {
    switch (m->stored) {
        case KT_SOURCE_BF16: read_bf16(m->codes + 2 * (row * m->k + first), count, w); break;
        case KT_SOURCE_FP16: read_fp16(m->codes + 2 * (row * m->k + first), count, w); break;
        case KT_SOURCE_FP32: memcpy(w, m->codes + 4 * (row * m->k + first), 4 * count); break;
        case KT_SOURCE_BYTES:
            for (size_t i = 0; i < count; i++) w[i] = m->values[m->codes[row * m->k + first + i]];
            break;
        case KT_SOURCE_NIBBLES:
            for (size_t i = 0; i < count; i++) {
                const uint8_t pair = m->codes[(row * m->k + first + i) / 2];
                w[i] = m->values[i % 2 ? pair >> 4 : pair & 15];
            }
            break;
    }
}

void kt_weights_read(const kt_weights *m, size_t row, size_t first, size_t count, float w[KT_CHUNK]) {
    float more[KT_CHUNK];
    read_codes(m, row, first, count, w);
    for (size_t i = count; i < KT_CHUNK; i++) w[i] = 0;
    if (m->points) {
        const size_t groups = (m->k + m->point_columns - 1) / m->point_columns;
        kt_spread(m->points + row * groups, m->point_columns, first, count, 0, more);
        for (size_t i = 0; i < KT_CHUNK; i++) w[i] -= more[i];
    }
    if (m->scales) {
        const size_t groups = (m->k + m->columns - 1) / m->columns;
        kt_spread(m->scales + row / m->rows * groups, m->columns, first, count, 0, more);
        for (size_t i = 0; i < KT_CHUNK; i++) w[i] *= more[i];
    }
    if (m->factors) {
        const float factor = m->factors[m->per_row ? row : 0];
        if (m->divides)
            for (size_t i = 0; i < count; i++) w[i] /= factor;
        else
            for (size_t i = 0; i < count; i++) w[i] *= factor;
    }
}
