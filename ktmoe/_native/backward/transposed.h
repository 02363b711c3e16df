/* The product of rows with a frozen matrix from its outputs' side. */
#ifndef KT_TRANSPOSED_H
#define KT_TRANSPOSED_H

#include "backward/job.h"

typedef struct kt_transposed {
    const kt_matrix *matrix;
    size_t k;                    /* inputs of the packed matrix, padded: columns of the result */
    const kt_product_rows *rows; /* its outputs */
    const kt_back_strip *strip;
    size_t panel, panels; /* of columns, 1 or 2 */
    bool add;             /* to what is there */
} kt_transposed;

/* Writes the product into the worker's out. */
void kt_transposed_product(const kt_back_worker *w, const kt_transposed *t);

#endif
