/* Gradients of the inputs of dense matrices: grad_x = grad_y W, several matrices in one call. */
#ifndef KT_BACKWARD_LINEAR_H
#define KT_BACKWARD_LINEAR_H

#include "forward/linear.h"

/* One matrix of a call. */
typedef struct kt_linear_gradient {
    const kt_layer *layer; /* as kt_linear has it; each of its kernels has an operand */
    const void *grad_y;    /* [tokens][stride], of which its outputs are a row */
    void *grad_x;          /* [tokens][x_stride], likewise its inputs */
    size_t stride, x_stride;
} kt_linear_gradient;

typedef struct kt_linear_gradients {
    size_t tokens, inputs; /* of each matrix */
    enum kt_dtype dtype, x_dtype;
    bool summed; /* all products are added up in the first matrix's grad_x; else each has its own */
    size_t count;
    /* Of one placement, of which each shard has a row of each; of their instruction sets one at most has state (kt_isa.enter). No grad_x
     * overlaps a grad_y or another grad_x. */
    kt_linear_gradient of[KT_LINEARS_MAX];
} kt_linear_gradients;

int kt_linear_backward(const kt_linear_gradients *call); /* with the lock held; 0 or an errno */

#endif
