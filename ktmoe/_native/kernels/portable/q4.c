/* q4 weights with UE8M0 scales per 32 k, bf16 activations widened to fp32, in portable C (GCC/Clang vector extension).
 *
 * SHAPES      x bf16 [m][k] by row pointers, W packed panels of 64 columns, out fp32 [m][64]
 * DEFINITION  for each panel, column c, row i:
 *                 acc = 0
 *                 for k ascending: acc = acc + x[k] * w[c][k]      (the product is exact short of fp32's range: 8 + 2 bits)
 *             folded: w = codebook[code] * 2^(b-127), exact in fp32
 *             else:   w = codebook[code], acc per group of 32 from zero, then total = total + acc * 2^(b-127), that step in
 *                     fp64 and rounded once, since the baseline has no FMA
 * LAYOUT      pack_q4.c. A code dword holds 8 k of one column; the nibble of k + j is at bit NIBBLE[j].
 * REGULARITIES lane = column. A run of K_BLOCK k is decoded to fp32 [k][64] in L1, then every row goes over it.
 *
 * One function serves all m: without a vector lookup, decoding costs so much that doing it once for all rows always pays.
 */
#include <string.h>

#include "kernels/portable/kernels.h"

typedef float f32x4 __attribute__((vector_size(16)));

enum {
    SUPERBLOCK_BYTES = KT_PANEL + KT_PANEL * KT_GROUP / 2,
    BLOCK_GROUPS = 4,
    K_BLOCK = BLOCK_GROUPS * KT_GROUP, /* decoded: 32 KiB */
    ROWS = 4,                          /* a tile: 4 rows x 8 columns = 8 accumulators of 16 registers */
    QUADS = 2,
};
static const int NIBBLE[8] = {0, 16, 4, 20, 8, 24, 12, 28};

typedef struct block {
    float w[K_BLOCK][KT_PANEL];
    float scale[BLOCK_GROUPS][KT_PANEL];
    float x[ROWS][K_BLOCK];
} block;

/* UE8M0 as fp32; byte 0 is 2^-127, a denormal. */
static inline float ue8m0(uint8_t b) {
    const uint32_t bits = b ? (uint32_t)b << 23 : 0x00400000;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float bf16(uint16_t b) {
    const uint32_t bits = (uint32_t)b << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline __attribute__((always_inline)) void decode(const uint8_t *restrict w, size_t groups,
                                                         const float *restrict codebook, block *restrict b, const int folded) {
    for (size_t g = 0; g < groups; g++, w += SUPERBLOCK_BYTES) {
        for (int c = 0; c < KT_PANEL; c++) b->scale[g][c] = ue8m0(w[c]);
        for (int c = 0; c < KT_PANEL; c += 4) {
            f32x4 scale;
            memcpy(&scale, &b->scale[g][c], sizeof scale);
            for (int o = 0; o < KT_GROUP / 8; o++) {
                uint32_t codes[4];
                memcpy(codes, w + KT_PANEL + c / 16 * 256 + o * 64 + c % 16 * 4, sizeof codes);
                for (int j = 0; j < 8; j++) {
                    f32x4 v;
                    for (int l = 0; l < 4; l++) v[l] = codebook[codes[l] >> NIBBLE[j] & 15];
                    if (folded) v *= scale;
                    memcpy(&b->w[g * KT_GROUP + o * 8 + j][c], &v, sizeof v);
                }
            }
        }
    }
}

static inline __attribute__((always_inline)) void tile(const block *restrict b, size_t groups, size_t c, int first_block,
                                                       float *restrict out, const int rows, const int folded) {
    f32x4 total[ROWS][QUADS];
    for (int i = 0; i < rows; i++)
        for (int q = 0; q < QUADS; q++) {
            if (first_block)
                total[i][q] = (f32x4){0};
            else
                memcpy(&total[i][q], out + i * KT_PANEL + c + 4 * q, sizeof(f32x4));
        }
    for (size_t g = 0; g < groups; g++) {
        f32x4 acc[ROWS][QUADS];
        for (int i = 0; i < rows; i++)
            for (int q = 0; q < QUADS; q++) acc[i][q] = folded ? total[i][q] : (f32x4){0};
        for (size_t k = g * KT_GROUP; k < (g + 1) * KT_GROUP; k++) {
            f32x4 w[QUADS];
            for (int q = 0; q < QUADS; q++) memcpy(&w[q], &b->w[k][c + 4 * q], sizeof w[q]);
            for (int i = 0; i < rows; i++)
                for (int q = 0; q < QUADS; q++) acc[i][q] += b->x[i][k] * w[q];
        }
        for (int i = 0; i < rows; i++)
            for (int q = 0; q < QUADS; q++) {
                if (folded) {
                    total[i][q] = acc[i][q];
                    continue;
                }
                for (int l = 0; l < 4; l++)
                    total[i][q][l] = (float)(total[i][q][l] + (double)acc[i][q][l] * b->scale[g][c + 4 * q + l]);
            }
    }
    for (int i = 0; i < rows; i++)
        for (int q = 0; q < QUADS; q++) memcpy(out + i * KT_PANEL + c + 4 * q, &total[i][q], sizeof(f32x4));
}

static inline __attribute__((always_inline)) void dot(const kt_dot *a, const int folded) {
    block *b = a->scratch;
    const size_t groups = a->k / KT_GROUP;
    for (size_t p = 0; p < a->panels; p++)
        for (size_t g0 = 0; g0 < groups; g0 += BLOCK_GROUPS) {
            const size_t count = groups - g0 < BLOCK_GROUPS ? groups - g0 : BLOCK_GROUPS;
            decode(a->w[p] + g0 * SUPERBLOCK_BYTES, count, a->codebook->value, b, folded);
            for (size_t first = 0; first < a->m; first += ROWS) {
                const int rows = a->m - first < ROWS ? (int)(a->m - first) : ROWS;
                for (int i = 0; i < rows; i++)
                    for (size_t k = 0; k < count * KT_GROUP; k++) b->x[i][k] = bf16(a->x[first + i][g0 * KT_GROUP + k]);
                float *out = a->out[p] + first * KT_PANEL;
                for (size_t c = 0; c < KT_PANEL; c += 4 * QUADS) switch (rows) {
                        case 1: tile(b, count, c, g0 == 0, out, 1, folded); break;
                        case 2: tile(b, count, c, g0 == 0, out, 2, folded); break;
                        case 3: tile(b, count, c, g0 == 0, out, 3, folded); break;
                        case 4: tile(b, count, c, g0 == 0, out, 4, folded); break;
                    }
            }
        }
}

static void folded(const kt_dot *a) { dot(a, 1); }
static void grouped(const kt_dot *a) { dot(a, 0); }

#define Q4_UE8M0 .family = "q4", .scale = "ue8m0", .extent = {1, 32}, .activations = "bf16", .scratch_bytes = sizeof(block)
const kt_kernel kt_q4_portable[] = {
    {Q4_UE8M0, .folded = 1, .few_max = KT_M_BLOCK, .few = folded, .many = folded},
    {Q4_UE8M0, .folded = 0, .few_max = KT_M_BLOCK, .few = grouped, .many = grouped},
    {0},
};
