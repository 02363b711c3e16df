/* The gated activation in portable C: one scalar expression, which the compiler vectorises. */
#include <string.h>

#include "kernels/exp.h"
#include "kernels/portable/kernels.h"

static inline float power_of_two(int32_t n) {
    const uint32_t bits = (uint32_t)(n + 127) << 23;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float exp_f32(float t) {
    t = t > KT_EXP_HIGH ? KT_EXP_HIGH : t; /* comparisons with NaN are false, so NaN passes */
    t = t < KT_EXP_LOW ? KT_EXP_LOW : t;
    /* Adding 1.5 * 2^23 leaves the rounded integer in the low bits: no conversion that would be undefined for NaN. */
    const float shifted = t * KT_EXP_LOG2E + 0x1.8p23f, n = shifted - 0x1.8p23f;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    const int32_t whole = (int32_t)(bits - 0x4B400000u), half = whole >> 1;
    const float r = (t - n * KT_EXP_LN2_HIGH) - n * KT_EXP_LN2_LOW;
    float p = KT_EXP_C6;
    p = p * r + KT_EXP_C5;
    p = p * r + KT_EXP_C4;
    p = p * r + KT_EXP_C3;
    p = p * r + KT_EXP_C2;
    p = p * r + KT_EXP_C1;
    p = p * r + 1.0f;
    /* In two steps, since 2^128 and 2^-150 are no floats; the first is exact. */
    return p * power_of_two(half) * power_of_two(whole - half);
}

static inline uint16_t bf16_from_f32(float v) {
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

void kt_activate_portable(const kt_activate *restrict a) {
    const kt_activation act = a->act;
    for (size_t i = 0; i < a->m; i++) {
        const float *restrict g_row = a->g + i * KT_PANEL, *restrict u_row = a->u + i * KT_PANEL;
        uint16_t *restrict h = a->h + i * a->h_stride;
        const float r = a->r ? a->r[i] : 1.0f;
        for (size_t c = 0; c < KT_PANEL; c++) {
            float g = g_row[c], u = u_row[c];
            if (a->bias_g) g += a->bias_g[c];
            if (a->bias_u) u += a->bias_u[c];
            g = g > act.limit ? act.limit : g;
            u = u > act.limit ? act.limit : u;
            u = u < -act.limit ? -act.limit : u;
            const float s = g / (1.0f + exp_f32(-act.alpha * g));
            h[c] = c < a->columns ? bf16_from_f32(s * (u + act.up_offset) * r) : 0;
        }
    }
}

void kt_exp_portable(const float *restrict x, float *restrict y, size_t count) {
    for (size_t i = 0; i < count; i++) y[i] = exp_f32(x[i]);
}
