/* Rows of x and h, where they are and as kernels take them. */
#ifndef KT_FORWARD_ROWS_H
#define KT_FORWARD_ROWS_H

#include "forward/route.h"

enum { KT_STAGE_TOKENS = 6 }; /* from so many on, copying rows pays: they may stand a power of two apart */

/* A caller's rows of numbers. */
typedef struct kt_given_rows {
    const void *x; /* [][stride], of which `columns` are a row */
    enum kt_dtype dtype;
    size_t columns, stride, k; /* k: columns, padded */
    const kt_block_rule *rule; /* that rounds them, or NULL */
} kt_given_rows;

/* A row as it enters a product, bf16 [k]: rounded, multiplied by *r unless that is NULL, padded. The caller's own or, where that is
 * another, in `own`. */
const uint16_t *kt_given_row(const kt_given_rows *from, size_t row, const float *r, uint16_t *own);
/* Whether all rows are what kt_given_row() gives, where they are. */
bool kt_given_as_it_is(const kt_given_rows *from);

/* What rows of x are made from. */
typedef struct kt_x {
    const kt_layer *layer;
    const kt_batch *batch;
    const kt_route *route;
    const uint8_t *together; /* [slots]: rows of the tile that the slot's row is in, where there are tiles */
    size_t k;                /* hidden, padded */
} kt_x;

/* x in one of the forms that kernels of gate and up take. */
typedef struct kt_x_form {
    const kt_rows *rows;
    bool stage;   /* rows are copied; else those of the caller's x are used where they are */
    bool by_slot; /* one a slot, else one a token */
    size_t stride_bytes;
    uint8_t *staged;
    const void **x; /* [slots] rows */
} kt_x_form;

size_t kt_row_bytes(size_t block_bytes, size_t k); /* from row to row */
/* Where row i of a piece is, or its first block, in an array of rows by slot. */
uint8_t *kt_row_of(const kt_rows *rows, uint8_t *base, size_t stride_bytes, const kt_piece *e, size_t i);
/* Writes inputs [first, first + count) of a row, bf16, to where a kernel looks for them. e2m1: blocks are E2M1 numbers times a
 * power of two. together: the rows of its tile. */
void kt_row_put(const kt_rows *rows, bool e2m1, const uint16_t *x, size_t first, size_t count, size_t k, size_t together,
                void *row);
/* kt_given_row() of a token, as it enters gate and up: multiplied by r where router weights multiply it. */
const uint16_t *kt_x_row(const kt_x *x, size_t token, float r, uint16_t *own);
bool kt_x_stages(const kt_x *x, const kt_x_form *form); /* whether rows are copied */
size_t kt_x_rows(const kt_x *x, const kt_x_form *form); /* that are, by form->stage */
void kt_x_point(const kt_x *x, kt_x_form *form);        /* fills form->x, likewise */
/* Copies rows [first, end) of those that are copied. row: [k], the worker's own. */
void kt_x_stage(const kt_x *x, const kt_x_form *form, size_t first, size_t end, uint16_t *row);

#endif
