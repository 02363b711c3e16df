/* The gradients of one layer's forward pass. */
#ifndef KT_BACKWARD_H
#define KT_BACKWARD_H

#include "forward/arenas.h"
#include "forward/forward.h"

/* The gradients of an adapter's two matrices, fp32 in their shapes; both NULL: they are not wanted. */
typedef struct kt_lora_gradient {
    float *a, *b;
} kt_lora_gradient;

typedef struct kt_backward {
    kt_batch batch;     /* as forward() had it, with what it kept; kept.g NULL: that is computed again */
    const void *grad_y; /* [tokens][hidden] */
    enum kt_dtype grad_dtype;
    void *grad_x;        /* as x; NULL: not wanted */
    float *grad_weights; /* [tokens][top_k], 0 for pairs that are skipped */
    kt_lora_gradient of[KT_MATRICES];
    bool add;    /* to what gradients of the adapter hold; else they are written whole */
    float scale; /* multiplies what goes into them */
} kt_backward;

/* Computes all gradients that are wanted; the caller holds the pool's lock. Returns 0 or an errno. Every matrix's kernel has an
 * operand. */
int kt_moe_backward(const kt_layer *layer, const kt_backward *backward);
kt_arenas *kt_backward_arenas(void);    /* those of all backward passes, of which one runs at a time */
size_t kt_backward_scratch_bytes(void); /* as kt_moe_scratch_bytes() */
void kt_backward_release(void);

#endif
