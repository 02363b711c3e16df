/* One layer's forward pass. */
#ifndef KT_FORWARD_H
#define KT_FORWARD_H

#include "layer/adapter.h"
#include "layer/layer.h"

enum kt_dtype { KT_BF16, KT_F32 };

static inline size_t kt_number_bytes(enum kt_dtype dtype) { return dtype == KT_F32 ? sizeof(float) : sizeof(uint16_t); }

/* What a call computes: both phases; or gate, up and the activation alone, which give h; or down and the sums alone, which take
 * it; or what is kept for backward alone. */
enum kt_stages { KT_ALL_STAGES, KT_GATE_UP, KT_DOWN, KT_KEPT };

/* What backward needs; a pair's is in the row that kt_batch.rows says. g NULL: nothing is kept. */
typedef struct kt_kept {
    float *g, *u; /* fp32 [][all of the intermediate columns], as the activation takes them */
    float *t;     /* fp32 [][KT_MATRICES][rank]: what the adapter's A gives, 0 for a matrix without; NULL without adapter */
} kt_kept;

typedef struct kt_batch {
    size_t tokens, top_k;
    const void *x; /* [tokens][hidden] */
    enum kt_dtype dtype;
    const int64_t *ids;   /* [tokens][top_k] */
    const float *weights; /* [tokens][top_k] */
    const uint8_t *mask;  /* [num_experts], 0 = skip; read once */
    void *y;              /* [tokens][hidden] */
    enum kt_dtype y_dtype;
    bool x_rounded; /* x is what the layer's rule of x gives */
    enum kt_stages stages;
    /* KT_GATE_UP and KT_DOWN: the h of a pair is row rows[token][slot] of h, bf16 [][all of the intermediate columns]. After
     * KT_GATE_UP it is not rounded by the layer's rule of h; KT_DOWN does not round it. The former does not look at y, the
     * latter not at x. */
    const uint32_t *rows; /* NULL: a pair's number, token * top_k + slot */
    uint16_t *h;
    size_t h_columns;
    const kt_adapter *adapter; /* NULL: none */
    kt_kept kept;
} kt_batch;

int kt_moe_forward(const kt_layer *layer, const kt_batch *batch); /* with the lock held; 0 or an errno */
size_t kt_moe_scratch_bytes(void);                                /* what the scratch arenas hold now; with the lock held */
void kt_moe_release(void);                                        /* gives them back; the next call makes others */

#endif
