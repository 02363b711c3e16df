/* What the avx2 objects offer each other: one line a kernel file. */
#ifndef KT_KERNELS_AVX2_H
#define KT_KERNELS_AVX2_H

#include "ktmoe.h"

extern const kt_rows kt_rows_avx2, kt_rows_int16_avx2, kt_rows_int8_avx2;
/* Each ends with an empty row. */
extern const kt_kernel kt_q4_avx2[], kt_b16_avx2[], kt_q4_int16_avx2[], kt_q4_int8_avx2[];
void kt_encode_int16_avx2(const uint16_t *x, size_t first, size_t count, size_t k, void *row);
void kt_encode_int8_avx2(const uint16_t *x, size_t first, size_t count, size_t k, void *row);
void kt_activate_avx2(const kt_activate *a);
void kt_exp_avx2(const float *x, float *y, size_t count);
void kt_read_avx2(const void *p, size_t bytes);
double kt_peak_avx2(size_t iterations);

extern const kt_isa kt_isa_avx2;

#endif
