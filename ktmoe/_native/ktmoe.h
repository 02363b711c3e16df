/* Types shared by the driver, the kernels and third-party native backends.
 *
 * Terms: n = outputs, k = inputs, m = tokens (rows); a panel is KT_PANEL output columns of a packed matrix; a superblock
 * is one panel by KT_GROUP k with its scales in front. Counts are elements; byte quantities end in _bytes.
 */
#ifndef KTMOE_H
#define KTMOE_H

#include <stddef.h>
#include <stdint.h>

/* Changes whenever a struct below or the packed layout does; core refuses a table built for another one. */
#define KT_ABI_VERSION 1
/* Version of the packed q4 layout, golden-tested. */
#define KT_Q4_LAYOUT_VERSION 1

enum {
    KT_PANEL = 64,   /* output columns of a panel */
    KT_GROUP = 32,   /* k of a superblock; x rows are readable up to a multiple of it */
    KT_M_BLOCK = 192 /* rows that one kernel call sees at most: its fp32 results stay in L2 */
};

/* A 16-entry codebook in the three forms that kernels look up. The bf16 tables stand there twice, since VPERMW reads five
 * index bits and the fifth is the neighbour's. */
typedef struct kt_codebook {
    uint16_t plain[32];  /* bf16 bits of the value */
    uint16_t folded[32]; /* sign | (bf16 bits of |value| + (126 << 7)), zero for zero: minus (253 - b) << 7, saturating,
                            is the bf16 of value * 2^(b-127), exactly, for 2 <= b <= 252 */
    float value[16];
} kt_codebook;

/* out[p][i][c] = sum over k ascending of x[i][k] * W_p[c][k], for p < panels, i < m, c < KT_PANEL.
 * One fp32 chain per output column: the bits do not depend on m, nor on which of a kernel's functions ran. */
typedef struct kt_dot {
    const uint16_t *const *x; /* m rows of bf16, k readable each */
    size_t m;
    size_t k;            /* multiple of KT_GROUP */
    const uint8_t *w[2]; /* packed panels, k / KT_GROUP superblocks each */
    size_t panels;       /* 1, or 2 (gate and up) */
    const kt_codebook *codebook;
    float *out[2]; /* fp32 [m][KT_PANEL], dense, 64-byte aligned */
    void *scratch; /* kt_kernel.scratch_bytes, 64-byte aligned, this thread's own */
} kt_dot;

/* One kernel: a weight family and scale class, and the functions that serve it. */
typedef struct kt_kernel {
    const char *family;      /* "q4" */
    const char *scale;       /* "ue8m0" */
    uint32_t extent[2];      /* rows and columns that share a scale */
    const char *activations; /* "bf16" */
    int folded;              /* 1: needs every scale byte in 2..252; 0: takes any, one partial sum per group */
    size_t few_max;          /* rows from which many() is the faster */
    size_t scratch_bytes;
    void (*few)(const kt_dot *);  /* m <= few_max */
    void (*many)(const kt_dot *); /* any m <= KT_M_BLOCK */
} kt_kernel;

/* GatedActivation's parameters; see ktmoe/activation.py. */
typedef struct kt_activation {
    float alpha, limit, up_offset;
} kt_activation;

/* h[i][c] = bf16(act(g[i][c] + bias_g[c], u[i][c] + bias_u[c]) * r[i]) for c < columns, 0 for the panel's other columns. */
typedef struct kt_activate {
    const float *g, *u;           /* fp32 [m][KT_PANEL], dense */
    const float *bias_g, *bias_u; /* fp32 [KT_PANEL], or NULL */
    const float *r;               /* fp32 [m], or NULL for 1 */
    size_t m, columns;
    kt_activation act;
    uint16_t *h; /* bf16, row stride h_stride */
    size_t h_stride;
} kt_activate;

/* What one instruction set offers. */
typedef struct kt_isa {
    uint32_t abi_version;             /* KT_ABI_VERSION */
    const char *name;                 /* a row of isa.py */
    const kt_kernel *const *families; /* arrays that end with an empty row; NULL ends the list */
    void (*activate)(const kt_activate *);
    void (*exp)(const float *x, float *y, size_t count); /* the activation's exp, for its error test */
    void (*read)(const void *p, size_t bytes);           /* touches every line: the read-bandwidth limit */
    double (*peak)(size_t iterations);                   /* dense multiplies from registers; returns the FLOPs it did */
} kt_isa;

#endif
