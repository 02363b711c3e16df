/* What the amx objects offer each other: one line a kernel file. */
#ifndef KT_KERNELS_AMX_H
#define KT_KERNELS_AMX_H

#include "ktmoe.h"

extern const kt_rows kt_rows_amx, kt_rows_f32_amx;
extern const kt_kernel kt_q4_amx[], kt_q4_folded_amx[], kt_q4_groups_amx[], kt_b16_amx[]; /* end with an empty row */
void kt_enter_amx(void);
void kt_leave_amx(void);
void kt_activate_amx(const kt_activate *a);
void kt_exp_amx(const float *x, float *y, size_t count);
void kt_read_amx(const void *p, size_t bytes);
double kt_peak_amx(size_t iterations);

extern const kt_isa kt_isa_amx;

#endif
