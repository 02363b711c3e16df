/* Packing: from a checkpoint's bytes to the packed layout, and back. */
#ifndef KT_PACK_H
#define KT_PACK_H

#include "base/placement.h"
#include "ktmoe.h"
#include "pack/order.h"

typedef struct kt_packing kt_packing;

/* The arrays of numbers that groups of weights have. An offset is a zero point or a minimum. */
enum { KT_SCALES, KT_SUPER_SCALES, KT_OFFSETS, KT_SUPER_OFFSETS, KT_GROUP_ARRAYS };

/* One array of numbers of groups as it is packed. */
typedef struct kt_group_array {
    size_t group;     /* k that share one; 0: there is no such array */
    size_t rows;      /* rows that do: 1, or whole panels, whose one is fp32 and stands in a line of copies */
    size_t bytes;     /* 1, 2; 4 only in lines */
    uint32_t padding; /* the bits of what pads */
    uint32_t magnitude,
        field;          /* all bits but a sign; those of the exponent: with all of them it is no real number. 0: it always is */
    bool negated;       /* they are packed with the other sign, since kernels subtract minima; of 2 bytes */
    uint8_t bits, plus; /* of items that are packed in fewer bits, 4 or 6: so many, and what is added before; else 0 */
} kt_group_array;

typedef struct kt_format {
    const kt_packing *packing; /* the family's */
    kt_order order;            /* of its codes */
    kt_group_array groups[KT_GROUP_ARRAYS];
    uint8_t padding;     /* a code: of 0, where one is */
    const kt_grid *grid; /* of families of records, which are packed as they stand, numbers of groups and all; NULL: of codes */
} kt_format;

/* A whole matrix [n][k] in the checkpoint's own bytes: codes in their order, the arrays of groups by row, along k. */
typedef struct kt_stored {
    const uint8_t *codes, *groups[KT_GROUP_ARRAYS];
    size_t n, k;
    const kt_fields *fields; /* of records: packing reads the arrays of groups from them */
} kt_stored;

/* What was seen while a matrix was packed. */
typedef struct kt_scan {
    /* The least and the greatest exponent field of scales that are not 0; of UE8M0 that is all bytes. low > high: none was seen. */
    uint8_t low, high;
    bool negative; /* a scale has its sign bit set */
    bool refused;  /* a weight or a number of a group is no real number */
} kt_scan;

/* What one shard has of one matrix. */
typedef struct kt_shard_matrix {
    const kt_format *format; /* NULL: leave it out */
    size_t row, column;      /* of the matrix, where it begins, */
    size_t n, k;             /* and its size */
    uint8_t *packed;
    kt_stored stored; /* to pack from */
} kt_shard_matrix;
size_t kt_packed_bytes(const kt_shard_matrix *m);

/* One family's layout. Panels are packed one by one, by any thread; scan is that thread's own and is added to. */
struct kt_packing {
    const char *family;
    size_t bits;        /* of a code, where the family has several sizes; else 0 */
    int version;        /* of the layout, golden-tested */
    size_t code_bits;   /* in a row of codes */
    size_t block_bytes; /* of records both are 0: kt_format.grid says their size */
    /* rows: the panel's codes, row i at rows + i * stride_bytes; from `count` on there are none. */
    bool (*pack_codes)(const kt_shard_matrix *m, const uint8_t *rows, size_t stride_bytes, size_t count, uint8_t *packed);
    void (*unpack_codes)(const kt_format *format, const uint8_t *packed, size_t count, size_t k, uint8_t *rows);
    /* One column of a panel, which is a row of codes. */
    void (*unpack_row)(const kt_format *format, const uint8_t *packed, size_t column, size_t k, uint8_t *row);
};
#define KT_FAMILIES(X) X(q4) X(f8) X(int2) X(int3) X(int5) X(int6) X(int8) X(b16) X(f16) X(f32) X(grid) X(ternary)
#define DECLARE(family) extern const kt_packing kt_pack_##family;
KT_FAMILIES(DECLARE)
#undef DECLARE
extern const kt_packing *const kt_packings[]; /* all of them; NULL ends the list */

/* The bytes of a row of so many columns, which are whole bytes of codes and whole scale groups, or end with the matrix. */
size_t kt_codes_bytes(const kt_format *format, size_t columns);
size_t kt_group_bytes(const kt_group_array *array, size_t columns); /* 0 without such an array */

/* A rectangle of a matrix to unpack into, dense: a matrix of its own, [rows][columns], as kt_stored has one. */
typedef struct kt_slice {
    size_t matrix;
    size_t row, rows, column, columns;
    uint8_t *codes, *groups[KT_GROUP_ARRAYS];
    const kt_fields *fields; /* of records: unpacking writes the arrays of groups into them */
} kt_slice;

enum { KT_MATRICES = 3 }; /* of an expert: gate, up, down */
/* The pool's threads pack and unpack, each shard's matrices by its own; the caller holds the pool's lock. They return 0 or an
 * errno. matrices: [shards][KT_MATRICES]. scans: [KT_MATRICES]. */
int kt_pack(const kt_placement *placement, const kt_shard_matrix *matrices, kt_scan *scans);
int kt_unpack(const kt_placement *placement, const kt_shard_matrix *matrices, const kt_slice *slices, size_t count);

#endif
