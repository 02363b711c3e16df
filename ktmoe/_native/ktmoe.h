/* Types shared by the driver, the kernels and third-party native backends.
 *
 * Terms: n = outputs, k = inputs, m = rows (an expert's tokens). A panel is KT_PANEL output columns of a packed matrix. A block
 * is KT_BLOCK k. A scale group is the k that share one scale. Counts are elements; byte quantities end in _bytes.
 */
#ifndef KTMOE_H
#define KTMOE_H

#include <stddef.h>
#include <stdint.h>

/* Changes whenever a struct below or a packed layout does; core refuses a table built for another one. */
#define KT_ABI_VERSION 10

enum {
    KT_PANEL = 64,            /* output columns of a panel */
    KT_BLOCK = 32,            /* k of a block; every k is padded to a multiple of it */
    KT_SCALE_GROUP_MIN = 16,  /* the shortest scale group: half a block, */
    KT_SCALE_GROUP_MAX = 128, /* and the longest: KT_BLOCK times a power of two */
    KT_SUPER_GROUP = 256,     /* k of scales that share a super-scale */
    KT_TILE_ROWS = 16,        /* rows that stand together where a kernel wants tiles of them */
    KT_ROWS_MAX = 192         /* rows that one kernel call sees at most: its fp32 results stay in L2. Whole tiles */
};

/* Some bits of a byte of a record: four copies of the byte, rotated to the left, and those that `mask` has. */
typedef struct kt_bits {
    uint32_t byte, rotate, mask;
} kt_bits;
/* A byte that is put together of the bits of two; of one, the second has no mask. */
typedef struct kt_byte {
    kt_bits of[2];
} kt_byte;

enum { KT_GRID_INDICES = 64, KT_GRID_SCALES = 16, KT_GRID_COUNT_MAX = 2048 };
/* Records of KT_SUPER_GROUP weights, whose codes are entries of a grid, by their indices, and signs; ktmoe/weights/grid_records.py
 * says what is in them. A code of 4 bits has a magnitude in the lower three and the sign above it. Records of digits to base 3
 * have record_bytes and super alone. */
typedef struct kt_grid {
    size_t record_bytes;
    size_t weights; /* of an entry: 8, its code of k at bits 2k and 2k + 1; or 4, nibbles k0 k2 k1 k3 */
    size_t count;   /* of entries, a power of two: 256 to KT_GRID_COUNT_MAX */
    const uint16_t *entries;
    int sign_bits;                     /* of 8 weights: 8; 7, the eighth is their parity; or 1 for all of them */
    int scales;                        /* 8 or 16: s is of 2 s + 1 times the super-scale */
    kt_byte index[2][KT_GRID_INDICES]; /* the lower and the upper byte of each index, along k */
    kt_byte sign[KT_SUPER_GROUP / 8];  /* from the lowest bit up, along k */
    kt_byte scale[KT_GRID_SCALES];
    kt_byte super[2]; /* of the fp16 super-scale, or of the only scale */
} kt_grid;

/* The values of an element of up to 6 bits in the forms that kernels look up. The bf16 tables have them over and over, since VPERMW
 * reads five index bits and VPERMI2W six, and those above a code are its neighbour's. */
typedef struct kt_codebook {
    uint16_t plain[64];   /* bf16 bits of the value; of 4-bit elements in the first 32, of integers of other sizes in all */
    uint16_t folded[32];  /* sign | (bf16 bits of |value| + (126 << 7)), zero for zero: minus (253 - b) << 7, saturating,
                            is the bf16 of value * 2^(b-127), exactly, for the b of codebook.fold_range() */
    uint16_t signed5[32]; /* of the integers 0 to 15, -16 to -1: what a code less its zero point is, by its low five bits */
    float value[16];
    int8_t whole[16];    /* value = whole * unit, |whole| <= 127 */
    float unit;          /* a power of two, 2^-8 to 1; 0 where there is none */
    int32_t zero;        /* of integers in planes of bits: the packed code of 0; a value is its code less this */
    const kt_grid *grid; /* of records that are packed as they stand; NULL: codes are */
} kt_codebook;

/* What a kernel takes as a row of k inputs: block_bytes for each block of them. Kernels that share one object of these share the
 * encoded rows.
 *
 * tiled: up to KT_TILE_ROWS rows of an expert stand together, block by block: block b of row i of r is at (b * r + i) * block_bytes,
 * so that with any r, KT_TILE_ROWS lines from block b of row 0 on are a tile whose first r rows are the rows'. Rows 16, 32, ... of
 * a call begin the next ones. What is beyond the last may be read, KT_TILE_ROWS * block_bytes in all, but behind a row alone, r = 1,
 * there is nothing: it may be the caller's own x. Not tiled: a row is whole. */
typedef struct kt_rows {
    const char *form; /* "bf16", "int16", "int8": what encoding rounds, and so which activation modes it serves */
    size_t block_bytes;
    int tiled; /* only with encode NULL */
    /* Encodes inputs [first, first + count) of a row of k, all multiples of KT_BLOCK, from x bf16 [count]. NULL: x as it is. */
    void (*encode)(const uint16_t *x, size_t first, size_t count, size_t k, void *row);
    /* Encodes rows in which the numbers of each block are E2M1's times one power of two, and may round none of them. NULL:
     * encode() rounds none of these. */
    void (*encode_e2m1)(const uint16_t *x, size_t first, size_t count, size_t k, void *row);
} kt_rows;

/* out[p][i][c] = sum over k ascending of x[i][k] * W_p[c][k], for p < panels, i < m, c < KT_PANEL.
 * Every output has one order of sums: its bits do not depend on m, nor on which of a kernel's functions ran. */
typedef struct kt_dot {
    const void *const *x; /* m rows as the kernel's kt_rows has them; of tiled ones, their first blocks */
    size_t m;
    size_t k;                    /* multiple of KT_BLOCK */
    const uint8_t *w[2];         /* packed panels */
    size_t panels;               /* 1, or 2: gate and up, or neighbours of down */
    size_t scale_group;          /* k that share a scale; the last group may be shorter. 0 without scales */
    const kt_codebook *codebook; /* of codes of up to 6 bits, and of integers */
    /* The panels that this thread is likely to be given next, as many as these, and their bytes: for a kernel to fetch while it
     * computes. next[0] NULL: none. */
    const uint8_t *next[2];
    size_t next_bytes;
    float *out[2]; /* fp32 [m][KT_PANEL], dense, 64-byte aligned; of tiled rows, whole tiles may be written */
    int add;       /* 1: sums begin with what out holds. Only kernels with scale "none" look at it */
    void *scratch; /* kt_kernel.scratch_bytes, 64-byte aligned, this thread's own */
} kt_dot;

/* KT_PANEL rows n and KT_PANEL columns k of a packed matrix, decoded, as what the transposed product takes,
 * out[i][k] = sum over n of x[i][n] * W[n][k]: KT_PANEL inputs of a packed panel without scales, whose outputs are these k. */
typedef struct kt_transposing {
    const uint8_t *w; /* a packed panel: these n */
    size_t k;         /* of it in all, a multiple of KT_BLOCK */
    size_t first;     /* of these k, a multiple of KT_PANEL; those from k on are zero */
    size_t scale_group;
    const kt_codebook *codebook;
    void *to[2]; /* of kt_kernel.operand's family; the second where there are two terms */
} kt_transposing;

/* One kernel: the weights and the form of rows, and the functions that serve them. */
typedef struct kt_kernel {
    const char *family;  /* of ktmoe/weights/elements.py */
    int bits;            /* of a code, where the family has several sizes; else 0 */
    const char *element; /* the only one that it decodes, "E4M3"; NULL: any of the family */
    /* As it stands in a packed panel: "ue8m0", "e4m3", "bf16", "fp16", "int8", "uint4", "int6"; "odd" in records; "none"; "panel", one fp32
     * for all columns. */
    const char *scale;
    /* The shortest and the longest scale group that it takes; 0 without scales. KT_SUPER_GROUP: such scales stand as super-scales do. */
    size_t scale_group_min;
    size_t scale_group_max;
    const char *super_scale; /* of what multiplies the scales of KT_SUPER_GROUP k: "fp16", or NULL: none */
    const char *offset;      /* "zero_point"; "minimum", stored as the scales are, super-scales included; or NULL: none */
    const kt_rows *rows;     /* what it takes */
    /* 0: takes any scale. Else scales are in the weights, where all scales of a matrix allow it (folding.py): a weight is 1 bf16
     * number, or the sum of 2, which needs scales that are not negative. */
    int folded;
    int whole; /* needs 4-bit values that have a unit, of which none is more than so many; 0: takes any values */
    /* "prefill": only for layers that are tuned for that, since it is slower for one row and has another order of sums. NULL: for
     * all layers. */
    const char *tuned_for;
    size_t few_max; /* rows up to which few() is the faster */
    size_t scratch_bytes;
    void (*few)(const kt_dot *);  /* m <= few_max */
    void (*many)(const kt_dot *); /* any m <= KT_ROWS_MAX */
    /* What training needs: the family of the transposed product's weights, "b16" or "f32", which hold a decoded weight exactly, or as
     * the sum of so many terms. The table has a kernel for that family, scale "none", rows of the form "bf16". NULL: cannot be
     * trained. */
    const char *operand;
    int terms; /* 1 or 2 */
    void (*transpose)(const kt_transposing *);
} kt_kernel;

/* GatedActivation's parameters; see ktmoe/weights/activation.py. */
typedef struct kt_activation {
    float alpha, limit, up_offset;
} kt_activation;

/* What becomes of a finished product, in this order, each step rounded: times or divided by factor, plus bias, plus added. */
typedef struct kt_finish {
    const float *factor; /* fp32 [KT_PANEL], or NULL */
    int divides;
    const float *bias;  /* fp32 [KT_PANEL], or NULL */
    const float *added; /* fp32 [m][KT_PANEL], dense, or NULL: what an adapter gives for these rows */
} kt_finish;

/* h[i][c] = bf16(act(finish(g[i][c]), finish(u[i][c])) * r[i]) for c < columns, 0 for the panel's other columns. */
typedef struct kt_activate {
    const float *g, *u; /* fp32 [m][KT_PANEL], dense */
    kt_finish finish_g, finish_u;
    const float *r; /* fp32 [m], or NULL for 1 */
    size_t m, columns;
    kt_activation act;
    uint16_t *h; /* bf16, row stride h_stride */
    size_t h_stride;
    float *kept_g, *kept_u; /* finish(g) and finish(u), columns of them, row stride kept_stride; NULL: not wanted */
    size_t kept_stride;
} kt_activate;

/* The gradients of the activation. With v = act(g[i][c], u[i][c]), h = bf16(v), or bf16(v * r[i]) where by_input, and
 * t = dh[i][c] * r[i], for c < columns:
 *     dg = bf16(t * dv/dg), du = bf16(t * dv/du), dr[i] = sum over c of dh * (by_input ? v : h)
 * dv/dg is 0 where g > limit, dv/du where |u| > limit. dg, du and h are 0 for the panel's other columns. The sum has one order. */
typedef struct kt_derive {
    const float *g, *u, *dh; /* fp32, row strides stride, stride, KT_PANEL */
    size_t stride;
    const float *r; /* fp32 [m], or NULL for 1 */
    int by_input;
    size_t m, columns;
    kt_activation act;
    uint16_t *dg, *du, *h; /* bf16, row stride to_stride */
    size_t to_stride;
    float *dr; /* fp32 [m] */
} kt_derive;

/* c[i][j] = sum over k ascending of a[i * a_row + k * a_k] * b[k * b_row + j], in fp32, from 0 or from what c holds: a chain of
 * multiply-and-add, so that the bits of a row do not depend on m, nor those of a column on n. */
typedef struct kt_dense {
    const float *a, *b;
    size_t a_row, a_k, b_row;
    float *c;
    size_t c_row;
    size_t m, n, k;
    int add;
} kt_dense;

/* c[i][j] = sum over k of a[i * a_row + k] * b[j * b_row + k], in fp32, from 0 or from what c holds. One order of sums, that depends
 * on k alone. */
typedef struct kt_dense_rows {
    const float *a, *b;
    size_t a_row, b_row;
    float *c;
    size_t c_row;
    size_t m, n, k;
    int add;
} kt_dense_rows;

/* What one instruction set offers. */
typedef struct kt_isa {
    uint32_t abi_version;            /* KT_ABI_VERSION */
    const char *name;                /* in ktmoe, a row of isa.py */
    const kt_kernel *const *kernels; /* arrays that end with an empty row; NULL ends the list */
    void (*enter)(void); /* each thread calls both, before and after it computes: state that kernels need. NULL: none */
    void (*leave)(void);
    void (*activate)(const kt_activate *);
    /* The functions that training needs; NULL: layers cannot be trained. */
    void (*derive)(const kt_derive *);
    void (*dense)(const kt_dense *);
    void (*dense_rows)(const kt_dense_rows *);
    void (*widen)(const uint16_t *x, float *y, size_t count); /* bf16 to fp32 */
    void (*exp)(const float *x, float *y, size_t count);      /* the activation's exp, for its error test */
    /* Touches every line, of so many equal parts by turns: the read-bandwidth limit, of which one stream may not be enough. */
    void (*read)(const void *p, size_t bytes, size_t streams);
    double (*peak)(size_t iterations); /* dense multiplies from registers; returns the FLOPs it did */
} kt_isa;

#endif
