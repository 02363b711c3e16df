/* q4 weights with UE8M0 scales per 32 k and bf16 rows, in plain C: the compiler makes vectors of the loops over columns.
 *
 * SHAPES      x bf16 [m][k] by row pointers, W packed panels of 64 columns, out fp32 [m][64]
 * DEFINITION  for each panel, row i, column c:
 *                 out = 0
 *                 for each block of 32 k: sum = 0; for k ascending: sum = sum + x[k] * codebook[code[k]]
 *                                         out = out + sum * 2^(b - 127)
 * LAYOUT      pack/q4.c: a block is its columns' 64 scale bytes b, then 1024 bytes of codes. The dword of column c and
 *             k..k+7 stands at c / 16 * 256 + k / 8 * 64 + c % 16 * 4; the nibble of k at its bit k % 8 / 2 * 4 + k % 2 * 16.
 * REGULARITIES a block is decoded once to fp32 [32][64], 8 KiB in L1, and serves all rows. Every m sums in the same order.
 */
#include <string.h>

#include "kernels/plain/kernels.h"

enum { BLOCK_BYTES = KT_PANEL + KT_PANEL * KT_BLOCK / 2 };

typedef struct block {
    float w[KT_BLOCK][KT_PANEL];
    float scale[KT_PANEL];
} block;

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void decode(const uint8_t *restrict packed, const float *restrict codebook, block *restrict b) {
    for (int c = 0; c < KT_PANEL; c++) {
        b->scale[c] = float_of(packed[c] ? (uint32_t)packed[c] << 23 : 0x00400000); /* byte 0 is 2^-127, a denormal */
        for (int k = 0; k < KT_BLOCK; k++) {
            uint32_t codes;
            memcpy(&codes, packed + KT_PANEL + c / 16 * 256 + k / 8 * 64 + c % 16 * 4, sizeof codes);
            b->w[k][c] = codebook[codes >> (k % 8 / 2 * 4 + k % 2 * 16) & 15];
        }
    }
}

static void dot(const kt_dot *a) {
    block *restrict b = a->scratch;
    for (size_t p = 0; p < a->panels; p++)
        for (size_t k0 = 0; k0 < a->k; k0 += KT_BLOCK) {
            decode(a->w[p] + k0 / KT_BLOCK * BLOCK_BYTES, a->codebook->value, b);
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
