/* What the avx512_bf16 objects offer each other: one line a kernel file. */
#ifndef KT_KERNELS_AVX512_BF16_H
#define KT_KERNELS_AVX512_BF16_H

#include "ktmoe.h"

extern const kt_rows kt_rows_avx512_bf16;
extern const kt_kernel kt_q4_avx512_bf16[], kt_b16_avx512_bf16[]; /* end with an empty row */
void kt_activate_avx512_bf16(const kt_activate *a);
void kt_exp_avx512_bf16(const float *x, float *y, size_t count);
void kt_read_avx512_bf16(const void *p, size_t bytes);
double kt_peak_avx512_bf16(size_t iterations);

extern const kt_isa kt_isa_avx512_bf16;

#endif
