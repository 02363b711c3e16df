/* q4 weights with UE8M0 scales per 32 k and bf16 rows, in plain C: the compiler makes vectors of the loops over columns.
 *
 * SHAPES      x bf16 [m][k] by row pointers, W packed panels of 64 columns, out fp32 [m][64]
 * DEFINITION  for each panel, row i, column c:
 *                 out = 0
 *                 for each block of 32 k: sum = 0; for k ascending: sum = sum + x[k] * codebook[code[k]]
 *                                         out = out + sum * 2^(b - 127)
 * LAYOUT      pack/layout.h. Each block has a header of its columns' 64 scale bytes b.
 * REGULARITIES a block is decoded once to fp32 [32][64], 8 KiB in L1, and serves all rows. Every m sums in the same order.
 */
#include <string.h>

#include "kernels/plain/kernels.h"
#include "pack/layout.h"

static const kt_layout layout = {.header_bytes = KT_PANEL, .block_bytes = KT_Q4_BLOCK_BYTES};

typedef struct block {
    float w[KT_BLOCK][KT_PANEL];
    float scale[KT_PANEL];
} block;

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void decode(const uint8_t *restrict panel, size_t number, const float *restrict codebook, block *restrict b) {
    const uint8_t *scales = panel + kt_header_at(&layout, number), *codes = panel + kt_block_at(&layout, number);
    for (int c = 0; c < KT_PANEL; c++) {
        b->scale[c] = float_of(scales[c] ? (uint32_t)scales[c] << 23 : 0x00400000); /* byte 0 is 2^-127, a denormal */
        for (int k = 0; k < KT_BLOCK; k++) {
            uint32_t dword;
            memcpy(&dword, codes + kt_q4_at(c, k), sizeof dword);
            b->w[k][c] = codebook[dword >> kt_q4_bit(k) & 15];
        }
    }
}

static void dot(const kt_dot *a) {
    block *restrict b = a->scratch;
    for (size_t p = 0; p < a->panels; p++)
        for (size_t k0 = 0; k0 < a->k; k0 += KT_BLOCK) {
            decode(a->w[p], k0 / KT_BLOCK, a->codebook->value, b);
            for (size_t i = 0; i < a->m; i++) {
                const uint16_t *restrict x = (const uint16_t *)a->x[i] + k0;
                float *restrict out = a->out[p] + i * KT_PANEL;
                float sum[KT_PANEL] = {0};
                for (int k = 0; k < KT_BLOCK; k++) {
                    const float xk = float_of((uint32_t)x[k] << 16);
                    for (int c = 0; c < KT_PANEL; c++) sum[c] += xk * b->w[k][c];
                }
                for (int c = 0; c < KT_PANEL; c++) out[c] = (k0 ? out[c] : 0) + sum[c] * b->scale[c];
            }
        }
}

/* One kernel: it takes any scale, so none of its own is needed for those that fold; and it decodes once for all rows, so that
 * few and many are the same. */
const kt_kernel kt_q4_plain[] = {
    {
        .family = "q4",
        .scale = "ue8m0",
        .scale_group_min = KT_BLOCK,
        .scale_group_max = KT_BLOCK,
        .rows = &kt_rows_plain,
        .few_max = KT_ROWS_MAX,
        .scratch_bytes = sizeof(block),
        .few = dot,
        .many = dot,
    },
    {0},
};
