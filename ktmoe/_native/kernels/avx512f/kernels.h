/* What the avx512f objects offer each other: one line a kernel file. */
#ifndef KT_KERNELS_AVX512F_H
#define KT_KERNELS_AVX512F_H

#include "ktmoe.h"

extern const kt_rows kt_rows_avx512f;
extern const kt_kernel kt_q4_avx512f[], kt_b16_avx512f[]; /* end with an empty row */
void kt_activate_avx512f(const kt_activate *a);
void kt_exp_avx512f(const float *x, float *y, size_t count);
void kt_read_avx512f(const void *p, size_t bytes);
double kt_peak_avx512f(size_t iterations);

extern const kt_isa kt_isa_avx512f;

#endif
