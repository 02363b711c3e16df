/* What the plain objects offer each other: one line a kernel file. */
#ifndef KT_KERNELS_PLAIN_H
#define KT_KERNELS_PLAIN_H

#include "ktmoe.h"

extern const kt_rows kt_rows_plain;
extern const kt_kernel kt_q4_plain[]; /* ends with an empty row */
void kt_activate_plain(const kt_activate *a);
void kt_exp_plain(const float *x, float *y, size_t count);
void kt_read_plain(const void *p, size_t bytes, size_t streams);
double kt_peak_plain(size_t iterations);

extern const kt_isa kt_isa_plain;

#endif
