/* Between a checkpoint's bytes and the packed layout. */
#ifndef KT_PACK_H
#define KT_PACK_H

#include "base/placement.h"

typedef struct kt_packing kt_packing;
typedef struct kt_format {
    const kt_packing *packing; /* the family's */
    size_t scale_group;        /* k that share a scale; 0 without scales */
    size_t scale_bytes;        /* of a stored scale: 1, 2; 0 without */
    uint16_t scale_one;        /* its bits for 1, which pads */
    uint8_t zero_code;         /* pads, too: its value is 0 */
} kt_format;

/* A matrix, or some rows or columns of it, in the checkpoint's own bytes. */
typedef struct kt_stored {
    const kt_format *format;
    const uint8_t *codes;  /* n rows */
    const uint8_t *scales; /* [n][ceil(k / scale_group)] */
    size_t n, k;
    size_t codes_stride_bytes, scales_stride_bytes; /* from row to row */
} kt_stored;

/* What was seen while a matrix was packed. */
typedef struct kt_scan {
    /* Of one-byte scales; of bf16 scales that are not 0, the least and the greatest exponent field. low > high: none were seen. */
    uint8_t low, high;
    bool refused; /* a scale or a weight is no real number */
} kt_scan;

/* One family's layout. Panels are packed one by one, by any thread; scan is that thread's own and is added to. */
struct kt_packing {
    const char *family;
    size_t code_bits;
    size_t (*panel_bytes)(const kt_format *format, size_t k);
    void (*pack)(const kt_stored *stored, size_t panel, uint8_t *packed, kt_scan *scan);
    /* The first `rows` of a panel, dense. */
    void (*unpack)(const kt_format *format, const uint8_t *panel, size_t rows, size_t k, uint8_t *codes, uint8_t *scales);
};
extern const kt_packing kt_pack_q4, kt_pack_b16;
const kt_packing *kt_packing_of(const char *family); /* NULL: no such family */

/* Of a row of so many columns, which are whole bytes of codes and whole scale groups, or end with the matrix. */
size_t kt_codes_bytes(const kt_format *format, size_t columns);
size_t kt_scales_bytes(const kt_format *format, size_t columns); /* 0 without scales */

/* What one shard has of one matrix. */
typedef struct kt_shard_matrix {
    const kt_format *format; /* NULL: leave it out */
    size_t row, column;      /* of the matrix, where it begins, */
    size_t n, k;             /* and its size */
    uint8_t *packed;
    kt_stored stored; /* to pack from */
} kt_shard_matrix;
size_t kt_packed_bytes(const kt_shard_matrix *m);

/* A rectangle of a matrix to unpack into, dense. */
typedef struct kt_slice {
    size_t matrix;
    size_t row, rows, column, columns;
    uint8_t *codes, *scales;
} kt_slice;

enum { KT_MATRICES = 3 }; /* of an expert: gate, up, down */
/* With the pool's lock held, by its threads, each shard's by its own; 0 or an errno. matrices: [shards][KT_MATRICES].
 * scans: [KT_MATRICES]. */
int kt_pack(const kt_placement *placement, const kt_shard_matrix *matrices, kt_scan *scans);
int kt_unpack(const kt_placement *placement, const kt_shard_matrix *matrices, const kt_slice *slices, size_t count);

#endif
