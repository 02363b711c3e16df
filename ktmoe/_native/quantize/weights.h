/* Weights as a checkpoint has them, read as float32, some of a row at a time. */
#ifndef KT_WEIGHTS_H
#define KT_WEIGHTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { KT_CHUNK = 256 }; /* weights that are read at a time: their arrays stay in L1 */

typedef enum kt_source { KT_SOURCE_BF16, KT_SOURCE_FP16, KT_SOURCE_FP32, KT_SOURCE_BYTES, KT_SOURCE_NIBBLES } kt_source;

/* A matrix [n, k] in the order of rows. A weight is (value - point) * scale, times its factor or divided by it.
 * The product before the factor must be exact in float32 if there is a factor: then a weight is rounded once at most.
 */
typedef struct kt_weights {
    kt_source stored;
    size_t n, k;
    const uint8_t *codes;
    const float *values;  /* of bytes: 256; of nibbles: 16; else NULL */
    const float *scales;  /* [ceil(n / rows), ceil(k / columns)], or NULL */
    const float *points;  /* [n, ceil(k / point_columns)], or NULL */
    const float *factors; /* [n] if per_row, else 1; or NULL */
    size_t rows, columns, point_columns;
    bool per_row, divides;
} kt_weights;

/* Weights first to first + count of a row, the rest of the chunk zeros. first and, but at the row's end, count are multiples of
 * 2; count is at most KT_CHUNK. */
void kt_weights_read(const kt_weights *m, size_t row, size_t first, size_t count, float w[KT_CHUNK]);

/* Gives each of count weights from first on its group's number, a group being so many columns; the rest of the chunk gets
 * `rest`. */
void kt_spread(const float *of_groups, size_t columns, size_t first, size_t count, float rest, float out[KT_CHUNK]);
void kt_spread_f64(const double *of_groups, size_t columns, size_t first, size_t count, double out[KT_CHUNK]); /* the rest: 0 */

#endif
