/* Rows of x and of the gradient of y, and the rows that enter products with frozen weights. */
#ifndef KT_BACKWARD_ROWS_H
#define KT_BACKWARD_ROWS_H

#include "backward/job.h"

const kt_kernel *kt_product_of(const kt_back_job *j, const kt_matrix *matrix); /* of its transposed operand */
size_t kt_together(const kt_piece *piece, size_t i);                           /* rows of the tile that row i is in */

/* Columns [first, first + count) of a row, bf16 numbers in fp32: of a token's x; of the x that enters a slot's expert; of the gradient of
 * its y. */
void kt_x_wide(const kt_back_job *j, size_t token, size_t first, size_t count, float *to);
void kt_expert_x_wide(const kt_back_job *j, size_t slot, size_t first, size_t count, float *to);
void kt_dy_wide(const kt_back_job *j, size_t slot, size_t first, size_t count, float *to);
void kt_dy_row(const kt_back_job *j, size_t slot, uint16_t *row); /* the last as bf16, padded to j->dy.k */

float kt_weight_of(const kt_back_job *j, size_t slot);        /* r_w */
float kt_output_weight_of(const kt_back_job *j, size_t slot); /* what multiplies its d in y */

/* Columns [first, first + count) of row i of a piece, whole panels of bf16, become inputs of a matrix's transposed product: times or
 * divided by its factor, and rounded again, where it has one. row is changed by that. */
void kt_product_put(const kt_back_job *j, const kt_matrix *matrix, const kt_product_rows *rows, const kt_piece *piece, size_t i,
                    size_t first, size_t count, uint16_t *row);

#endif
