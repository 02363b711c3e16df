/* Products of dense fp32 matrices, which adapters are, in the widest vectors of the instruction set.
 *
 * DEFINITION  dense       c[i][j] = the chain over k ascending of multiply_add(a[i][k], b[k][j], sum)
 *             dense_rows  the same with b[j][k], k up to CHAIN_MAX, whose strips are turned first: one vector of products a k is
 *                         less than what a sum across the lanes costs. Of longer rows, lane l of LANES has the chain over the
 *                         k = l, l + LANES, ..., and the lanes are added up by halves.
 * REGULARITIES  A tile's sums stay in registers for all k, and an output's bits do not depend on the tile that it is in.
 */
#include "kernels/common/training.h"
#include "kernels/common/vector.h"
#include "sanitizer.h"

/* Tiles of up to so many rows: of several vectors; of one vector, enough chains to hide the latency; of sums across lanes. */
#define UP_TO_8(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#if VECTOR_BYTES == 64
enum { TILE_VECTORS = 4, TILE_ROWS = 6, TALL_ROWS = 12, DOT_ROWS = 6 }; /* 24 sums of 32 registers */
#define WIDE(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#define TALL(CASE) UP_TO_8(CASE) CASE(9) CASE(10) CASE(11) CASE(12)
#define DOTS(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#elif VECTOR_BYTES == 32
enum { TILE_VECTORS = 2, TILE_ROWS = 6, TALL_ROWS = 12, DOT_ROWS = 3 }; /* 12 of 16 */
#define WIDE(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#define TALL(CASE) UP_TO_8(CASE) CASE(9) CASE(10) CASE(11) CASE(12)
#define DOTS(CASE) CASE(1) CASE(2) CASE(3)
#else
enum { TILE_VECTORS = 2, TILE_ROWS = 4, TALL_ROWS = 8, DOT_ROWS = 2 };
#define WIDE(CASE) CASE(1) CASE(2) CASE(3) CASE(4)
#define TALL(CASE) UP_TO_8(CASE)
#define DOTS(CASE) CASE(1) CASE(2)
#endif

enum {
    DOT_COLUMNS = 4,
    CHAIN_MAX = 256,
    TURNED = 64, /* rows and columns of a turned strip, 16 KiB */
};

typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));

/* clang has no __builtin_shuffle, GCC before 12 no __builtin_shufflevector. */
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (i32x4){__VA_ARGS__})
#endif

/* The first `count` lanes of a vector, fewer than LANES; the others are zero, and their memory is not touched. */
#if VECTOR_BYTES == 64
INLINE __mmask16 first_lanes(const size_t count) { return (__mmask16)((1u << count) - 1); }
INLINE f32v load_first(const float *p, const size_t count) {
    kt_will_read(p, count * sizeof *p);
    return (f32v)_mm512_maskz_loadu_ps(first_lanes(count), p);
}
INLINE void store_first(float *p, const f32v v, const size_t count) {
    kt_will_write(p, count * sizeof *p);
    _mm512_mask_storeu_ps(p, first_lanes(count), (__m512)v);
}
#elif VECTOR_BYTES == 32
INLINE __m256i first_lanes(const size_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
INLINE f32v load_first(const float *p, const size_t count) {
    kt_will_read(p, count * sizeof *p);
    return (f32v)_mm256_maskload_ps(p, first_lanes(count));
}
INLINE void store_first(float *p, const f32v v, const size_t count) {
    kt_will_write(p, count * sizeof *p);
    _mm256_maskstore_ps(p, first_lanes(count), (__m256)v);
}
#else
INLINE f32v load_first(const float *p, const size_t count) {
    return (f32v){p[0], count > 1 ? p[1] : 0, count > 2 ? p[2] : 0, 0};
}
INLINE void store_first(float *p, const f32v v, const size_t count) {
    for (size_t l = 0; l < count; l++) p[l] = v[l];
}
#endif

/* Rows from i on, columns from j on; first: how many of the columns of one vector there are, or 0: all of each. */
INLINE void tile(const kt_dense *restrict d, const size_t i, const size_t j, const int rows, const int vectors,
                 const size_t first) {
    const float *a = d->a + i * d->a_row, *b = d->b + j;
    float *const c = d->c + i * d->c_row + j;
    f32v sum[TALL_ROWS][TILE_VECTORS];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            const float *const from = c + r * d->c_row + v * LANES;
            sum[r][v] = !d->add ? splat(0) : first ? load_first(from, first) : load_f32(from);
        }
#pragma GCC unroll 1
    for (size_t k = 0; k < d->k; k++, a += d->a_k, b += d->b_row) {
        f32v w[TILE_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) w[v] = first ? load_first(b, first) : load_f32(b + v * LANES);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            const f32v x = splat(a[r * d->a_row]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sum[r][v] = multiply_add(x, w[v], sum[r][v]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            float *const to = c + r * d->c_row + v * LANES;
            if (first)
                store_first(to, sum[r][v], first);
            else
                store_f32(to, sum[r][v]);
        }
}

/* m rows in as few tiles of at most `most` rows as there can be, whose rows differ by one at most. */
#define EACH_TILE(m, most)                                                                                         \
    for (size_t i = 0, tiles = ((m) + (most) - 1) / (most), rows; tiles && (rows = ((m) - i + tiles - 1) / tiles); \
         i += rows, tiles--)

/* Calls the tile of each number of rows, which a tile's code has in it. */
static void wide(const kt_dense *d, const size_t j) {
#define CASE(rows) \
    case rows: tile(d, i, j, rows, TILE_VECTORS, 0); break;
    EACH_TILE(d->m, TILE_ROWS) switch (rows) { WIDE(CASE) }
#undef CASE
}

static void tall(const kt_dense *d, const size_t j) {
#define CASE(rows) \
    case rows: tile(d, i, j, rows, 1, 0); break;
    EACH_TILE(d->m, TALL_ROWS) switch (rows) { TALL(CASE) }
#undef CASE
}

static void tall_first(const kt_dense *d, const size_t j, const size_t first) {
#define CASE(rows) \
    case rows: tile(d, i, j, rows, 1, first); break;
    EACH_TILE(d->m, TALL_ROWS) switch (rows) { TALL(CASE) }
#undef CASE
}

void KT_NAME(dense)(const kt_dense *d) {
    size_t j = 0;
    for (; j + TILE_VECTORS * LANES <= d->n; j += TILE_VECTORS * LANES) wide(d, j);
    for (; j + LANES <= d->n; j += LANES) tall(d, j);
    if (j < d->n) tall_first(d, j, d->n - j);
}

/* v[i][l] becomes v[l][i]. */
INLINE void turn_four(f32x4 v[4]) {
    const f32x4 first02 = SHUFFLE(v[0], v[2], 0, 4, 1, 5), first13 = SHUFFLE(v[1], v[3], 0, 4, 1, 5);
    const f32x4 last02 = SHUFFLE(v[0], v[2], 2, 6, 3, 7), last13 = SHUFFLE(v[1], v[3], 2, 6, 3, 7);
    v[0] = SHUFFLE(first02, first13, 0, 4, 1, 5);
    v[1] = SHUFFLE(first02, first13, 2, 6, 3, 7);
    v[2] = SHUFFLE(last02, last13, 0, 4, 1, 5);
    v[3] = SHUFFLE(last02, last13, 2, 6, 3, 7);
}

/* to[k][j] = b[j * b_row + k], j < n, k < count. */
static void turn(const float *restrict b, const size_t b_row, const size_t n, const size_t count,
                 float (*restrict to)[TURNED]) {
    size_t j = 0;
    for (; j + 4 <= n; j += 4) {
        const float *const from = b + j * b_row;
        size_t k = 0;
        for (; k + 4 <= count; k += 4) {
            f32x4 v[4];
#pragma GCC unroll 4
            for (int l = 0; l < 4; l++) memcpy(&v[l], from + l * b_row + k, sizeof v[l]);
            turn_four(v);
#pragma GCC unroll 4
            for (int l = 0; l < 4; l++) memcpy(&to[k + l][j], &v[l], sizeof v[l]);
        }
        for (; k < count; k++)
            for (int l = 0; l < 4; l++) to[k][j + l] = from[l * b_row + k];
    }
    for (; j < n; j++)
        for (size_t k = 0; k < count; k++) to[k][j] = b[j * b_row + k];
}

static void by_chains(const kt_dense_rows *r) {
    _Alignas(LINE) float turned[TURNED][TURNED];
    for (size_t j = 0; j < r->n; j += TURNED) {
        size_t k = 0;
        do {
            const size_t n = least(r->n - j, TURNED), count = least(r->k - k, TURNED);
            turn(r->b + j * r->b_row + k, r->b_row, n, count, turned);
            KT_NAME(dense)(&(kt_dense){
                .a = r->a + k,
                .b = turned[0],
                .a_row = r->a_row,
                .a_k = 1,
                .b_row = TURNED,
                .c = r->c + j,
                .c_row = r->c_row,
                .m = r->m,
                .n = n,
                .k = count,
                .add = r->add || k,
            });
            k += TURNED;
        } while (k < r->k);
    }
}

/* The sums over the lanes of four vectors. */
INLINE f32x4 across(const f32v sum[DOT_COLUMNS]) {
    f32x4 v[DOT_COLUMNS];
#pragma GCC unroll 4
    for (int j = 0; j < DOT_COLUMNS; j++) {
        f32x4 quads[LANES / 4];
        memcpy(quads, &sum[j], sizeof quads);
#pragma GCC unroll 2
        for (int half = LANES / 8; half; half /= 2)
#pragma GCC unroll 2
            for (int p = 0; p < half; p++) quads[p] += quads[p + half];
        v[j] = quads[0];
    }
    turn_four(v);
    return (v[0] + v[2]) + (v[1] + v[3]);
}

/* Rows from i on, columns from j on, of which there are n, at most DOT_COLUMNS. */
INLINE void dots(const kt_dense_rows *restrict d, const size_t i, const size_t j, const int rows, const size_t n) {
    const float *const a = d->a + i * d->a_row, *b[DOT_COLUMNS];
    for (size_t l = 0; l < DOT_COLUMNS; l++) b[l] = d->b + (j + least(l, n - 1)) * d->b_row; /* the last again: not stored */
    f32v sum[DOT_ROWS][DOT_COLUMNS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int l = 0; l < DOT_COLUMNS; l++) sum[r][l] = splat(0);
#define STEP(LOAD)                                                                                               \
    {                                                                                                            \
        f32v x[DOT_ROWS];                                                                                        \
        _Pragma("GCC unroll 6") for (int r = 0; r < rows; r++) x[r] = LOAD(a + r * d->a_row + k);                \
        _Pragma("GCC unroll 4") for (int l = 0; l < DOT_COLUMNS; l++) {                                          \
            const f32v w = LOAD(b[l] + k);                                                                       \
            _Pragma("GCC unroll 6") for (int r = 0; r < rows; r++) sum[r][l] = multiply_add(x[r], w, sum[r][l]); \
        }                                                                                                        \
    }
    size_t k = 0;
#pragma GCC unroll 1
    for (; k + LANES <= d->k; k += LANES) STEP(load_f32)
#define LOAD_LAST(p) load_first(p, d->k - k)
    if (k < d->k) STEP(LOAD_LAST)
#undef LOAD_LAST
#undef STEP
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        float *const c = d->c + (i + r) * d->c_row + j;
        const f32x4 total = across(sum[r]);
        for (size_t l = 0; l < n; l++) c[l] = d->add ? c[l] + total[l] : total[l];
    }
}

static void by_lanes(const kt_dense_rows *d) {
#define CASE(rows) \
    case rows: dots(d, i, j, rows, least(d->n - j, DOT_COLUMNS)); break;
    EACH_TILE(d->m, DOT_ROWS)
    for (size_t j = 0; j < d->n; j += DOT_COLUMNS) switch (rows) {
            DOTS(CASE)
        }
#undef CASE
}

void KT_NAME(dense_rows)(const kt_dense_rows *d) {
    if (d->k > CHAIN_MAX)
        by_lanes(d);
    else
        by_chains(d);
}

void KT_NAME(widen)(const uint16_t *restrict x, float *restrict y, size_t count) {
    for (size_t i = 0; i < count; i++) {
        const uint32_t bits = (uint32_t)x[i] << 16;
        memcpy(&y[i], &bits, sizeof bits);
    }
}
