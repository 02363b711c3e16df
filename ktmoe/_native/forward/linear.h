/* Products of dense matrices: y = x W^T + b, several matrices in one call. */
#ifndef KT_LINEAR_H
#define KT_LINEAR_H

#include "forward/forward.h"

enum { KT_LINEARS_MAX = 64 }; /* matrices of a call */

/* One matrix of a call. */
typedef struct kt_linear {
    const kt_layer *layer; /* of one expert, whose gate is the matrix: hidden inputs */
    size_t column;         /* of x: it takes `hidden` of them from here on */
    void *y;               /* [tokens][stride], of which its outputs are a row */
    size_t stride;
} kt_linear;

typedef struct kt_linears {
    size_t tokens;
    const void *x; /* [tokens][stride] */
    size_t stride;
    enum kt_dtype dtype, y_dtype;
    size_t count;
    /* Each of their shards has a row at least. No y overlaps x or another y. */
    kt_linear of[KT_LINEARS_MAX]; /* of one placement; of their instruction sets one at most has state (kt_isa.enter) */
} kt_linears;

int kt_linear_forward(const kt_linears *call); /* with the lock held; 0 or an errno */

#endif
