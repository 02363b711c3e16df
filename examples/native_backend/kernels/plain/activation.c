/* The gated activation, and its exp: the C library's, whose error is far below what docs/numerics.md allows. */
#include <math.h>
#include <string.h>

#include "kernels/plain/kernels.h"

/* Round to nearest, ties to even; a NaN stays one. */
static uint16_t bf16_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* A column of a finished product: its factor, its bias, and what an adapter adds. */
static float finished(float value, const kt_finish *f, size_t row, size_t c) {
    if (f->factor) value = f->divides ? value / f->factor[c] : value * f->factor[c];
    if (f->bias) value += f->bias[c];
    return f->added ? value + f->added[row * KT_PANEL + c] : value;
}

void kt_activate_plain(const kt_activate *a) {
    const kt_activation act = a->act;
    for (size_t i = 0; i < a->m; i++)
        for (size_t c = 0; c < KT_PANEL; c++) {
            float g = finished(a->g[i * KT_PANEL + c], &a->finish_g, i, c);
            float u = finished(a->u[i * KT_PANEL + c], &a->finish_u, i, c);
            /* comparisons with NaN are false, so that NaN passes */
            g = g > act.limit ? act.limit : g;
            u = u > act.limit ? act.limit : u < -act.limit ? -act.limit : u;
            float h = g / (1.0f + expf(-act.alpha * g)) * (u + act.up_offset);
            if (a->r) h *= a->r[i];
            a->h[i * a->h_stride + c] = c < a->columns ? bf16_of(h) : 0;
        }
}

void kt_exp_plain(const float *x, float *y, size_t count) {
    for (size_t i = 0; i < count; i++) y[i] = expf(x[i]);
}
