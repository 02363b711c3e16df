/* One layer's experts as the forward pass sees them. */
#ifndef KT_LAYER_H
#define KT_LAYER_H

#include "base/placement.h"
#include "ktmoe.h"
#include "pack/pack.h"
#include "quantize/blocks.h"

typedef struct kt_matrix {
    const uint8_t *data; /* NULL until packed */
    size_t panel_bytes;
    size_t scale_group; /* k that share a scale; 0 without scales */
    const kt_kernel *kernel;
    size_t x_form; /* of gate and up: which of the layer's x_rows its kernel takes */
    const kt_codebook *codebook;
    const float *bias;   /* fp32, padded to whole panels, or NULL */
    const float *factor; /* fp32, likewise; or KT_PANEL copies of the one that all columns share */
    size_t factor_step;  /* from panel to panel: KT_PANEL, or 0 */
    bool divides;
} kt_matrix;

typedef union kt_expert {
    struct {
        kt_matrix gate, up, down;
    };
    kt_matrix matrices[KT_MATRICES];
} kt_expert;

/* Some of the intermediate dimension of every expert. */
typedef struct kt_shard {
    size_t first, intermediate; /* columns [first, first + intermediate) of h; of a dense matrix, rows */
    kt_expert *experts;         /* [num_experts] */
} kt_shard;

enum kt_router_weight { KT_DOWN_OUTPUT, KT_DOWN_INPUT, KT_EXPERT_INPUT };

enum { KT_X_FORMS = 4 };

typedef struct kt_layer {
    size_t num_experts, hidden;
    const kt_placement *placement;
    kt_shard *shards; /* [kt_shards_of(placement)]; their outputs are added in this order */
    kt_activation act;
    const kt_isa *isa;
    enum kt_router_weight router_weight;
    const kt_block_rule *round_x, *round_h; /* what the activation mode rounds them by, or NULL */
    const kt_rows *x_rows[KT_X_FORMS];      /* what the kernels of gate and up take, each once; NULL beyond */
    size_t h_block_bytes;                   /* the most that any kernel of down takes for a block */
    size_t kernel_scratch_bytes;            /* the most that any of its kernels asks for */
} kt_layer;

/* Lets a kernel compute a matrix of the layer, down or not; the caller holds the pool's lock. False: that would be too many
 * forms of x. */
bool kt_layer_use(kt_layer *layer, kt_matrix *matrix, bool down, const kt_kernel *kernel);

#endif
