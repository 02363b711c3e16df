/* q4 weights with UE8M0 scales per 32 k, bf16 activations, VDPBF16PS.
 *
 * SHAPES      x bf16 [m][k] by row pointers, W packed panels of 64 columns, out fp32 [m][64]
 * DEFINITION  for each panel, column c, row i:
 *                 acc = 0
 *                 for k pairs ascending: acc = fma(x[k+1], w[c][k+1], acc); acc = fma(x[k], w[c][k], acc)   (VDPBF16PS)
 *             folded: w = codebook[code] * 2^(b-127), exact in bf16
 *             else:   w = codebook[code], acc per group of 32 from zero, then total = fma(acc, 2^(b-127), total)
 * LAYOUT      pack_q4.c. A vector of codes is 8 k of 16 columns; word shifts 0, 4, 8, 12 and VPERMW give the k-pairs.
 * REGULARITIES lane = column: x is broadcast, nothing is shuffled after the lookup, every m sums in the same order.
 *
 * few():  codes go straight to registers and serve all rows of a pass: one row takes gate and up together, 2 to 5 rows a panel,
 *         6 to 12 rows half a panel at a time; so 8 to 24 chains hide VDPBF16PS's latency, and fit into registers.
 * many(): a panel of K_BLOCK k is decoded once into L1, in pair layout, then 6 rows x 64 columns run over it; fp32 sums are
 *         spilled and reloaded, exactly, between K blocks.
 */
#include <immintrin.h>

#include "kernels/avx512_bf16/kernels.h"

#define INLINE static inline __attribute__((always_inline))

enum {
    VECTORS = KT_PANEL / 16, /* of 16 columns a panel */
    OCTETS = KT_GROUP / 8,   /* code vectors of a block of 16 columns */
    PAIRS = KT_GROUP / 2,    /* k-pairs of a superblock */
    SUPERBLOCK_BYTES = KT_PANEL + KT_PANEL * KT_GROUP / 2,
    PASS_ROWS = 12,        /* x 2 vectors = 24 accumulators */
    PASS_ROWS_GROUPED = 5, /* x 2 vectors x (group sum, total) */
    TILE_ROWS = 6,         /* x 4 vectors = 24 accumulators */
    TILE_ROWS_GROUPED = 3, /* x 4 vectors x (group sum, total) */
    K_BLOCK = 256,         /* of a decoded panel: 32 KiB */
    BLOCK_GROUPS = K_BLOCK / KT_GROUP,
    LINE = 64,
};

/* UE8M0 as what VPSUBUSW takes from both bf16 of a pair: (253 - b) << 7. */
INLINE __m512i fold_shift(const uint8_t *scales) {
/* Byte i to both words of lane i, zero above it. */
#define LANE(i) (int)(0x80008000u | (i) * 0x00010001u)
    const __m512i spread = _mm512_setr_epi32(LANE(0), LANE(1), LANE(2), LANE(3), LANE(4), LANE(5), LANE(6), LANE(7), LANE(8),
                                             LANE(9), LANE(10), LANE(11), LANE(12), LANE(13), LANE(14), LANE(15));
#undef LANE
    const __m512i b = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)scales)), spread);
    return _mm512_slli_epi16(_mm512_sub_epi16(_mm512_set1_epi16(253), b), 7);
}

/* UE8M0 as fp32; byte 0 is 2^-127, a denormal, where the shift alone would give 0. */
INLINE __m512 scale_f32x16(const uint8_t *scales) {
    const __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)scales));
    const __m512i bits = _mm512_slli_epi32(b, 23);
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(bits, _mm512_testn_epi32_mask(b, b), _mm512_set1_epi32(0x00400000)));
}

INLINE __m512i load_codebook(const kt_dot *a, const int folded) {
    return _mm512_loadu_si512(folded ? a->codebook->folded : a->codebook->plain);
}

/* k-pair j (0..3) of a code vector, as bf16. */
INLINE __m512i decode(const __m512i codes, const int j, const __m512i codebook, const __m512i shift, const int folded) {
    const __m512i w = _mm512_permutexvar_epi16(j ? _mm512_srli_epi16(codes, 4 * j) : codes, codebook);
    return folded ? _mm512_subs_epu16(w, shift) : w;
}

INLINE __m512 dot(const __m512 acc, const __m512i w, const uint16_t *pair) {
    int32_t x;
    __builtin_memcpy(&x, pair, sizeof x);
    return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32(x));
}

/* rows x (vectors * 16 columns) straight from the codes. All but a and first are constants at every call: vectors is 8 (both
 * panels), 4 (one panel) or 2 (half of it, from vector v0), so that rows * vectors chains hide the latency of VDPBF16PS and
 * their accumulators stay in registers. A broadcast of x serves all vectors. */
INLINE void pass(const kt_dot *restrict a, const size_t first, const int rows, const int panel, const int v0, const int vectors,
                 const int folded) {
    const __m512i codebook = load_codebook(a, folded);
    const uint8_t *w[2] = {a->w[panel], a->w[vectors > VECTORS ? 1 : panel]};
    const uint16_t *x[PASS_ROWS];
    __m512 total[PASS_ROWS][2 * VECTORS];
    for (int i = 0; i < rows; i++) {
        x[i] = a->x[first + i];
        for (int v = 0; v < vectors; v++) total[i][v] = _mm512_setzero_ps();
    }
    for (size_t k = 0; k < a->k; k += KT_GROUP) {
        __m512i shift[2 * VECTORS];
        __m512 acc[PASS_ROWS][2 * VECTORS];
        for (int v = 0; v < vectors; v++) {
            if (folded) shift[v] = fold_shift(w[v / VECTORS] + 16 * (v0 + v % VECTORS));
            for (int i = 0; i < rows; i++) acc[i][v] = folded ? total[i][v] : _mm512_setzero_ps();
        }
#pragma GCC unroll 1
        for (int o = 0; o < OCTETS; o++) {
            __m512i codes[2 * VECTORS];
            for (int v = 0; v < vectors; v++)
                codes[v] = _mm512_loadu_si512(w[v / VECTORS] + KT_PANEL + ((v0 + v % VECTORS) * OCTETS + o) * LINE);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                __m512i wj[2 * VECTORS];
                for (int v = 0; v < vectors; v++) wj[v] = decode(codes[v], j, codebook, shift[v], folded);
                for (int i = 0; i < rows; i++)
                    for (int v = 0; v < vectors; v++) acc[i][v] = dot(acc[i][v], wj[v], x[i] + k + o * 8 + j * 2);
            }
        }
        for (int v = 0; v < vectors; v++) {
            const __m512 scale = folded ? _mm512_setzero_ps() : scale_f32x16(w[v / VECTORS] + 16 * (v0 + v % VECTORS));
            for (int i = 0; i < rows; i++) total[i][v] = folded ? acc[i][v] : _mm512_fmadd_ps(acc[i][v], scale, total[i][v]);
        }
        w[0] += SUPERBLOCK_BYTES;
        w[1] += SUPERBLOCK_BYTES;
    }
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < vectors; v++)
            _mm512_store_ps(a->out[vectors > VECTORS ? v / VECTORS : panel] + (first + i) * KT_PANEL + 16 * (v0 + v % VECTORS),
                            total[i][v]);
}

#define WHOLE(rows) \
    case rows: pass(a, first, rows, panel, 0, VECTORS, folded); break
#define HALVES(rows)                                                   \
    case rows:                                                         \
        pass(a, first, rows, panel, 0, VECTORS / 2, folded);           \
        pass(a, first, rows, panel, VECTORS / 2, VECTORS / 2, folded); \
        break

/* Rows [first, first + rows) of every panel; rows up to PASS_ROWS, or PASS_ROWS_GROUPED. */
INLINE void passes(const kt_dot *a, const size_t first, const size_t rows, const int folded) {
    if (rows == 1 && a->panels == 2) {
        pass(a, first, 1, 0, 0, 2 * VECTORS, folded);
        return;
    }
    for (int panel = 0; panel < (int)a->panels; panel++) {
        if (folded) {
            switch (rows) {
                WHOLE(1);
                WHOLE(2);
                WHOLE(3);
                WHOLE(4);
                WHOLE(5);
                HALVES(6);
                HALVES(7);
                HALVES(8);
                HALVES(9);
                HALVES(10);
                HALVES(11);
                HALVES(12);
            }
        } else {
            switch (rows) {
                WHOLE(1);
                WHOLE(2);
                HALVES(3);
                HALVES(4);
                HALVES(5);
            }
        }
    }
}

/* The next step's rows when `left` are to go in equal steps of at most `most`: 7 are 4 + 3, not 6 + 1, since few chains
 * would wait for their own latency. */
INLINE size_t step_rows(size_t left, size_t most) {
    const size_t steps = (left + most - 1) / most;
    return (left + steps - 1) / steps;
}

INLINE void few(const kt_dot *a, const int folded) {
    for (size_t first = 0, rows; first < a->m; first += rows) {
        rows = step_rows(a->m - first, folded ? PASS_ROWS : PASS_ROWS_GROUPED);
        passes(a, first, rows, folded);
    }
}

/* A decoded K block: bf16 [pair][column][2], and the scales where they are not folded. */
typedef struct panel_block {
    uint16_t w[K_BLOCK / 2][KT_PANEL][2];
    float scale[BLOCK_GROUPS][KT_PANEL];
} panel_block;

INLINE void decode_block(const uint8_t *restrict w, size_t groups, const __m512i codebook, panel_block *restrict b,
                         const int folded) {
    for (size_t g = 0; g < groups; g++, w += SUPERBLOCK_BYTES) {
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            const __m512i shift = folded ? fold_shift(w + 16 * v) : _mm512_setzero_si512();
            if (!folded) _mm512_store_ps(&b->scale[g][16 * v], scale_f32x16(w + 16 * v));
#pragma GCC unroll 4
            for (int o = 0; o < OCTETS; o++) {
                const __m512i codes = _mm512_loadu_si512(w + KT_PANEL + (v * OCTETS + o) * LINE);
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++)
                    _mm512_store_si512(b->w[g * PAIRS + o * 4 + j][16 * v], decode(codes, j, codebook, shift, folded));
            }
        }
    }
}

/* rows x 64 columns over a decoded block. */
INLINE void tile(const panel_block *restrict b, size_t groups, const uint16_t *const *restrict rows_x, size_t k0,
                 float *restrict out, const int rows, const int folded) {
    __m512 total[TILE_ROWS][VECTORS];
    const uint16_t *x[TILE_ROWS];
    for (int i = 0; i < rows; i++) {
        x[i] = rows_x[i] + k0;
        for (int v = 0; v < VECTORS; v++) total[i][v] = k0 ? _mm512_load_ps(out + i * KT_PANEL + 16 * v) : _mm512_setzero_ps();
    }
    for (size_t g = 0; g < groups; g++) {
        __m512 acc[TILE_ROWS][VECTORS];
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < VECTORS; v++) acc[i][v] = folded ? total[i][v] : _mm512_setzero_ps();
        for (size_t pair = g * PAIRS; pair < (g + 1) * PAIRS; pair++) {
            __m512i w[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) w[v] = _mm512_load_si512(b->w[pair][16 * v]);
#pragma GCC unroll 6
            for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) acc[i][v] = dot(acc[i][v], w[v], x[i] + pair * 2);
        }
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < VECTORS; v++)
                total[i][v] =
                    folded ? acc[i][v] : _mm512_fmadd_ps(acc[i][v], _mm512_load_ps(&b->scale[g][16 * v]), total[i][v]);
    }
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < VECTORS; v++) _mm512_store_ps(out + i * KT_PANEL + 16 * v, total[i][v]);
}

/* One K block of one panel. Panels are innermost, so that the second finds the rows' x in L2. */
typedef struct step {
    size_t panel, k0, groups;
    const uint8_t *w;
} step;

INLINE step step_at(const kt_dot *a, size_t s) {
    const size_t panel = s % a->panels, k0 = s / a->panels * K_BLOCK, left = (a->k - k0) / KT_GROUP;
    return (step){panel, k0, left < BLOCK_GROUPS ? left : BLOCK_GROUPS, a->w[panel] + k0 / KT_GROUP * SUPERBLOCK_BYTES};
}

INLINE void many(const kt_dot *a, const int folded) {
    const __m512i codebook = load_codebook(a, folded);
    panel_block *block = a->scratch;
    const size_t m = a->m, most = folded ? TILE_ROWS : TILE_ROWS_GROUPED, tiles = (m + most - 1) / most;
    const size_t steps = (a->k + K_BLOCK - 1) / K_BLOCK * a->panels;
    for (size_t s = 0; s < steps; s++) {
        const step now = step_at(a, s), next = step_at(a, s + 1 < steps ? s + 1 : s);
        decode_block(now.w, now.groups, codebook, block, folded);
        /* While this block is multiplied, the next one's codes and x come to L2, a share with each tile: the rows' pieces are too
         * short for the hardware to foresee. */
        const size_t next_bytes = next.groups * SUPERBLOCK_BYTES, share = (next_bytes / tiles + LINE) / LINE * LINE;
        size_t fetched = 0;
        for (size_t first = 0, rows; first < m; first += rows) {
            rows = step_rows(m - first, most);
            for (size_t end = fetched + share; fetched < end && fetched < next_bytes; fetched += LINE)
                _mm_prefetch((const char *)next.w + fetched, _MM_HINT_T1);
            if (next.k0 != now.k0)
                for (size_t i = first; i < first + rows; i++)
                    for (size_t k = next.k0; k < next.k0 + next.groups * KT_GROUP; k += LINE / sizeof *a->x[i])
                        _mm_prefetch((const char *)(a->x[i] + k), _MM_HINT_T1);
            float *out = a->out[now.panel] + first * KT_PANEL;
            const uint16_t *const *x = a->x + first;
            switch (rows) {
                case 1: tile(block, now.groups, x, now.k0, out, 1, folded); break;
                case 2: tile(block, now.groups, x, now.k0, out, 2, folded); break;
                case 3: tile(block, now.groups, x, now.k0, out, 3, folded); break;
                case 4:
                    if (folded) tile(block, now.groups, x, now.k0, out, 4, 1);
                    break;
                case 5:
                    if (folded) tile(block, now.groups, x, now.k0, out, 5, 1);
                    break;
                case 6:
                    if (folded) tile(block, now.groups, x, now.k0, out, 6, 1);
                    break;
            }
        }
    }
}

static void few_folded(const kt_dot *a) { few(a, 1); }
static void few_grouped(const kt_dot *a) { few(a, 0); }
static void many_folded(const kt_dot *a) { many(a, 1); }
static void many_grouped(const kt_dot *a) { many(a, 0); }

#define Q4_UE8M0 \
    .family = "q4", .scale = "ue8m0", .extent = {1, 32}, .activations = "bf16", .scratch_bytes = sizeof(panel_block)
const kt_kernel kt_q4_avx512_bf16[] = {
    {Q4_UE8M0, .folded = 1, .few_max = 12, .few = few_folded, .many = many_folded},
    {Q4_UE8M0, .folded = 0, .few_max = 5, .few = few_grouped, .many = many_grouped},
    {0},
};
