/* KT_ISA is the row of isa.py that a file here is compiled for; every external name that it defines ends with it. KT_ROWS,
 * KT_ACTIVATION and KT_DENSE are the rows whose objects of rows.c, activation.c and dense.c it uses; KT_SOURCE is the file's name. */
#ifndef KT_ISA_H
#define KT_ISA_H

#include "ktmoe.h"

#define KT_JOIN_(what, isa) kt_##what##_##isa
#define KT_JOIN(what, isa) KT_JOIN_(what, isa)
#define KT_NAME(what) KT_JOIN(what, KT_ISA)
#define KT_FORM(what) KT_JOIN(what, KT_ROWS)

/* rows.c: what kernels take as rows. Kernels of one ISA that take the same form name the same object, and so share encoded rows. */
extern const kt_rows KT_FORM(rows_f32), KT_FORM(rows_f32_sums), KT_FORM(rows_bf16), KT_FORM(rows_bf16_sums),
    KT_FORM(rows_bf16_tiles), KT_FORM(rows_int16), KT_FORM(rows_int8);

void KT_JOIN(activate, KT_ACTIVATION)(const kt_activate *a);
void KT_JOIN(exp, KT_ACTIVATION)(const float *x, float *y, size_t count);
void KT_NAME(read)(const void *p, size_t bytes, size_t streams);
double KT_NAME(peak)(size_t iterations);

#endif
