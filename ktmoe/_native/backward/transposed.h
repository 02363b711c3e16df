/* The product of rows with a packed matrix from its outputs' side; the rows and the memory that it needs. */
#ifndef KT_TRANSPOSED_H
#define KT_TRANSPOSED_H

#include "forward/calls.h"
#include "forward/carve.h"
#include "forward/rows.h"
#include "layer/layer.h"

enum { KT_PRODUCT_PANELS = 8 }; /* panels of a packed matrix that are decoded at once, each for two panels of columns */

/* The kernels of a table that multiply operands, and the most that one of them asks for. */
typedef struct kt_products {
    const kt_kernel *of[2]; /* b16, f32; NULL: the table has none */
    size_t block_bytes, scratch_bytes;
} kt_products;

/* Rows as the kernel of a product takes them; k is padded to whole panels. */
typedef struct kt_product_rows {
    uint8_t *base;
    size_t k, stride_bytes; /* the latter for any kernel */
} kt_product_rows;

/* What one worker's products need. */
typedef struct kt_product_scratch {
    kt_panel_row *out[2]; /* [KT_ROWS_MAX] each: products of two panels of columns */
    const void **rows;    /* [KT_ROWS_MAX] */
    void *operand[2][2];  /* [panels of columns][terms]: KT_PRODUCT_PANELS decoded ones */
    void *kernel;
} kt_product_scratch;

typedef struct kt_transposed {
    const kt_products *products;
    const kt_matrix *matrix;
    size_t k;                    /* inputs of the packed matrix, padded: columns of the result */
    const kt_product_rows *rows; /* its outputs */
    const kt_piece *piece;       /* which of these stand together */
    size_t first, m;             /* rows of the piece, KT_ROWS_MAX at most */
    size_t panel, panels;        /* of columns, 1 or 2 */
    bool add;                    /* to what is there */
} kt_transposed;

/* The kernel that multiplies an operand of this family; NULL: the table has none. */
const kt_kernel *kt_product_for(const kt_isa *isa, const char *family);
kt_products kt_products_of(const kt_isa *isa);

kt_product_rows kt_product_rows_carve(const kt_products *products, kt_carver *c, size_t rows, size_t panels);
kt_product_scratch kt_product_scratch_carve(size_t kernel_bytes,
                                            kt_carver *c); /* kernel_bytes: scratch_bytes, the most of any */

/* Columns [first, first + count) of row i of a piece, whole panels of bf16, become inputs of a matrix's transposed product: times or
 * divided by its factor, and rounded again, where it has one. row is changed by that. */
void kt_product_put(const kt_products *products, const kt_matrix *matrix, const kt_product_rows *rows, const kt_piece *piece,
                    size_t i, size_t first, size_t count, uint16_t *row);
/* Writes the product into out. */
void kt_transposed_product(const kt_product_scratch *s, const kt_transposed *t);

static inline size_t kt_columns(size_t all, size_t first, size_t most) { return all - first < most ? all - first : most; }

#endif
