/* Calls of kernels. */
#ifndef KT_CALLS_H
#define KT_CALLS_H

#include "forward/forward.h"

typedef float kt_panel_row[KT_PANEL];
typedef uint16_t kt_panel_h[KT_PANEL]; /* bf16 */

void kt_multiply(const kt_dot *dot, const kt_kernel *kernel);
size_t kt_call_rows(size_t left);                         /* of the next kernel call */
kt_finish kt_finish_of(const kt_matrix *w, size_t panel); /* a panel's factor and bias */
void kt_finish_rows(kt_panel_row *d, size_t m, const kt_finish *f);
/* Writes so many numbers to an array of that dtype, from its `at`-th on. */
void kt_store(const float *from, size_t columns, void *y, enum kt_dtype dtype, size_t at);

#endif
