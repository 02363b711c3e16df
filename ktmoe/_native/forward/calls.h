/* Calls of kernels. */
#ifndef KT_CALLS_H
#define KT_CALLS_H

#include "layer/layer.h"

typedef float kt_panel_row[KT_PANEL];
typedef uint16_t kt_panel_h[KT_PANEL]; /* bf16 */

void kt_multiply(const kt_dot *dot, const kt_kernel *kernel);
size_t kt_call_rows(size_t left);                         /* of the next kernel call */
kt_finish kt_finish_of(const kt_matrix *w, size_t panel); /* a panel's factor and bias */

#endif
