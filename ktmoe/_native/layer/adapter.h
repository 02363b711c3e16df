/* A LoRA adapter of a layer's experts: each matrix with one has weights W + scale * B A. Its numbers are its owner's. */
#ifndef KT_ADAPTER_H
#define KT_ADAPTER_H

#include <stdbool.h>

#include "ktmoe.h"
#include "pack/pack.h"

/* A dense array of numbers, fp32 or bf16. */
typedef struct kt_low_rank {
    const void *data; /* NULL: none */
    bool bf16;
} kt_low_rank;

typedef struct kt_lora {
    kt_low_rank a; /* [num_experts][rank][the matrix's inputs] */
    kt_low_rank b; /* [num_experts][its outputs][rank] */
} kt_lora;

typedef struct kt_adapter {
    size_t rank;
    float scale;
    kt_lora of[KT_MATRICES]; /* gate, up, down; both or none of an a and its b */
} kt_adapter;

enum { KT_OF_GATE, KT_OF_UP, KT_OF_DOWN }; /* the order of an expert's matrices */

/* Numbers as fp32: where they are, or in scratch. */
typedef struct kt_wide {
    const float *at;
    size_t stride; /* from row to row */
} kt_wide;

/* rows x columns numbers from number `at` on, of rows `stride` apart. scratch: as many, which may be used. */
static inline kt_wide kt_widened(const kt_isa *isa, const kt_low_rank *m, size_t at, size_t stride, size_t rows, size_t columns,
                                 float *scratch) {
    if (!m->bf16) return (kt_wide){(const float *)m->data + at, stride};
    const uint16_t *from = (const uint16_t *)m->data + at;
    if (columns == stride) {
        isa->widen(from, scratch, rows * columns);
        return (kt_wide){scratch, columns};
    }
    for (size_t i = 0; i < rows; i++) isa->widen(from + i * stride, scratch + i * columns, columns);
    return (kt_wide){scratch, columns};
}

#endif
