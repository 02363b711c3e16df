/* Rows of x and of the gradient of y. */
#ifndef KT_BACKWARD_ROWS_H
#define KT_BACKWARD_ROWS_H

#include "backward/job.h"

/* Columns [first, first + count) of a row, bf16 numbers in fp32: of a token's x; of the x that enters a slot's expert; of the gradient of
 * its y. */
void kt_x_wide(const kt_back_job *j, size_t token, size_t first, size_t count, float *to);
void kt_expert_x_wide(const kt_back_job *j, size_t slot, size_t first, size_t count, float *to);
void kt_dy_wide(const kt_back_job *j, size_t slot, size_t first, size_t count, float *to);
void kt_dy_row(const kt_back_job *j, size_t slot, uint16_t *row); /* the last as bf16, padded to j->dy.k */

float kt_weight_of(const kt_back_job *j, size_t slot);        /* r_w */
float kt_output_weight_of(const kt_back_job *j, size_t slot); /* what multiplies its d in y */

#endif
