/* What the avx_vnni objects offer each other: one line a kernel file. */
#ifndef KT_KERNELS_AVX_VNNI_H
#define KT_KERNELS_AVX_VNNI_H

#include "ktmoe.h"

extern const kt_rows kt_rows_int16_avx_vnni, kt_rows_int8_avx_vnni;
extern const kt_kernel kt_q4_int16_avx_vnni[], kt_q4_int8_avx_vnni[]; /* end with an empty row */
void kt_encode_int16_avx_vnni(const uint16_t *x, size_t first, size_t count, size_t k, void *row);
void kt_encode_int8_avx_vnni(const uint16_t *x, size_t first, size_t count, size_t k, void *row);
void kt_activate_avx_vnni(const kt_activate *a);
void kt_exp_avx_vnni(const float *x, float *y, size_t count);
void kt_read_avx_vnni(const void *p, size_t bytes);
double kt_peak_avx_vnni(size_t iterations);

extern const kt_isa kt_isa_avx_vnni;

#endif
