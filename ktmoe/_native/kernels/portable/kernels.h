/* What the portable objects offer each other: one line a kernel file. */
#ifndef KT_KERNELS_PORTABLE_H
#define KT_KERNELS_PORTABLE_H

#include "ktmoe.h"

extern const kt_rows kt_rows_portable;
extern const kt_kernel kt_q4_portable[], kt_b16_portable[]; /* end with an empty row */
void kt_activate_portable(const kt_activate *a);
void kt_exp_portable(const float *x, float *y, size_t count);
void kt_read_portable(const void *p, size_t bytes);
double kt_peak_portable(size_t iterations);

extern const kt_isa kt_isa_portable;

#endif
