/* Packed panels times tiles of rows: the loop nest of the kernels that multiply with TDPBF16PS.
 *
 * SHAPES      m rows of k inputs, bf16, tiled (ktmoe.h); W packed panels of 64 columns; out fp32 [m][64]
 * DEFINITION  for each panel, column c, row i:
 *                 out = 0; for each 32 k ascending:
 *                     even = odd = 0; for the 16 pairs ascending: even = fma(x[k], w[k], even); odd = fma(x[k+1], w[k+1], odd)
 *                     out = out + (even + odd)
 *             each step rounded to nearest even, denormals taken as and flushed to zero: Intel SDM, TDPBF16PS
 * LAYOUT      the family's packing. A tile of B is 16 k-pairs of 16 columns: 32 k, a step; a panel has 4 a step.
 * REGULARITIES scales are part of the weights, so that C stays in tiles over all of k, or a K block, whatever a group is. Rows
 *             beyond m are computed with whatever is there, and written where nobody looks: no row needs another configuration.
 *
 * few():  up to 16 rows: C has all 64 columns, and over all k. While a step's tiles are multiplied, the next one's are decoded.
 * many(): 32 rows by 32 columns at a time; C is put aside between K blocks. While a block is multiplied, the next one is decoded,
 *         a tile each step: TDPBF16PS takes 16 cycles and no other unit, decoding a tile about 25 of the others.
 *
 * A kernel file defines, before it includes this:
 *     IN_PLACE                  1: packed weights are tiles of B, B_STRIDE bytes from k-pair to k-pair; decode_tile() is not used
 *     STEP_BYTES                of a packed panel, as a rule
 *     weights, open_panel(a, p) what is needed of panel p all the time
 *     step_at(w, step)          where the packed step is
 *     tile_at(w, step, n)       and a tile of it, columns 16 n to 16 n + 15
 *     decode_tile(w, step, n, to)
 */
#include "kernels/amx/tile.h"
#include "kernels/vector.h"

enum {
    WIDTH = KT_PANEL / 16, /* tiles */
    AHEAD_STEPS = 1,         /* that few() decodes ahead */
    RING = 2,
    LINE = 64,
    STEP_LINES = STEP_BYTES / LINE,
    FEW_AHEAD_BYTES = 2048,   /* of a panel, between what few() uses and what it prefetches to L1 */
    MANY_AHEAD_BYTES = 16384, /* likewise, many() to L2 */
};

/* A decoded step, and what many() has of them: two blocks, one that is multiplied and one that is being decoded. */
typedef uint8_t step_tiles[WIDTH][TILE_BYTES];

INLINE size_t least(size_t a, size_t b) { return a < b ? a : b; }

INLINE const uint8_t *b_tile(const weights *w, const size_t step, const int n, const step_tiles *decoded) {
    return IN_PLACE ? tile_at(w, step, n) : (*decoded)[n];
}

enum { B_BYTES = IN_PLACE ? B_STRIDE : TILE_ROW_BYTES };

/* A tile of rows: `together` of them, from row `first` on. A row alone has nothing behind it that may be read. */
typedef struct row_tile {
    const uint8_t *x;
    size_t step_bytes, stride;
} row_tile;

INLINE row_tile rows_at(const kt_dot *a, const size_t first) {
    const size_t together = least(KT_TILE_ROWS, a->m - first);
    return (row_tile){a->x[first], together * TILE_ROW_BYTES, together > 1 ? TILE_ROW_BYTES : 0};
}

/* A tile's share of the lines that are a given distance ahead. */
#define FETCH(prefetch, w, step, n, ahead)                                                            \
    for (int line = (n) * STEP_LINES / WIDTH, end = ((n) + 1) * STEP_LINES / WIDTH; line < end; line++) \
    prefetch(step_at(w, step) + (ahead) + line * LINE)

INLINE void few(const kt_dot *a) {
    step_tiles *ring = a->scratch; /* AHEAD_STEPS + 1 */
    const size_t steps = a->k / KT_GROUP;
    const row_tile x = rows_at(a, 0);
    for (size_t p = 0; p < a->panels; p++) {
        const weights w = open_panel(a, p);
        for (size_t step = 0; step < least(AHEAD_STEPS, steps) && !IN_PLACE; step++)
            for (int n = 0; n < WIDTH; n++) decode_tile(&w, step, n, ring[step][n]);
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
        for (size_t step = 0; step < steps; step++) {
            const step_tiles *now = &ring[step % RING];
            step_tiles *next = &ring[(step + AHEAD_STEPS) % RING];
            const int more = step + AHEAD_STEPS < steps;
/* Two tiles of B take turns. */
#define COLUMNS(n, b)                                                   \
    TILE_LOAD(b, b_tile(&w, step, n, now), B_BYTES);                    \
    TILE_DOT(n, 4, b);                                                  \
    FETCH(prefetch_l1, &w, step, n, FEW_AHEAD_BYTES);                   \
    if (!IN_PLACE && more) decode_tile(&w, step + AHEAD_STEPS, n, (*next)[n])
            TILE_LOAD(4, x.x + step * x.step_bytes, x.stride);
            COLUMNS(0, 6);
            COLUMNS(1, 7);
            COLUMNS(2, 6);
            COLUMNS(3, 7);
#undef COLUMNS
        }
        TILE_STORE(0, a->out[p], KT_PANEL * sizeof(float));
        TILE_STORE(1, a->out[p] + 16, KT_PANEL * sizeof(float));
        TILE_STORE(2, a->out[p] + 32, KT_PANEL * sizeof(float));
        TILE_STORE(3, a->out[p] + 48, KT_PANEL * sizeof(float));
    }
}


/* What many() prefetches to L2 while it works on a panel: the next one, a share with each step. */
typedef struct stream {
    const uint8_t *at, *end;
    size_t share;
} stream;

INLINE void fetch(stream *s) {
    for (size_t line = 0; line < s->share && s->at < s->end; line++, s->at += LINE) prefetch_l2(s->at);
}

/* C of `tiles` x 16 rows from `first` on, by columns 16 n to 16 n + 31, over all k. Three tiles of rows leave one for A and one for B:
 * each row tile is loaded for both of B's, the second time from L1. */
INLINE void multiply(const kt_dot *a, const weights *w, const size_t first, const int tiles, const int n, float *out, stream *s) {
    step_tiles *ring = a->scratch;
    const size_t steps = a->k / KT_GROUP;
    const row_tile x0 = rows_at(a, first), x1 = tiles > 1 ? rows_at(a, first + 16) : x0,
                   x2 = tiles > 2 ? rows_at(a, first + 32) : x0;
    for (size_t step = 0; step < least(AHEAD_STEPS, steps) && !IN_PLACE; step++)
        for (int i = n; i < n + 2; i++) decode_tile(w, step, i, ring[step][i]);
    TILE_ZERO(0);
    TILE_ZERO(1);
    if (tiles > 1) TILE_ZERO(2);
    if (tiles > 1) TILE_ZERO(3);
    if (tiles > 2) TILE_ZERO(4);
    if (tiles > 2) TILE_ZERO(5);
    for (size_t step = 0; step < steps; step++) {
        const step_tiles *now = &ring[step % RING];
        step_tiles *next = &ring[(step + AHEAD_STEPS) % RING];
        const int more = !IN_PLACE && step + AHEAD_STEPS < steps;
        const uint8_t *a0 = x0.x + step * x0.step_bytes, *a1 = x1.x + step * x1.step_bytes, *a2 = x2.x + step * x2.step_bytes;
        TILE_LOAD(6, b_tile(w, step, n, now), B_BYTES);
        TILE_LOAD(7, a0, x0.stride);
        TILE_DOT(0, 7, 6);
        if (tiles > 1) TILE_LOAD(7, a1, x1.stride);
        if (tiles > 1) TILE_DOT(2, 7, 6);
        if (tiles > 2) TILE_LOAD(7, a2, x2.stride);
        if (tiles > 2) TILE_DOT(4, 7, 6);
        if (more) decode_tile(w, step + AHEAD_STEPS, n, (*next)[n]);
        TILE_LOAD(6, b_tile(w, step, n + 1, now), B_BYTES);
        TILE_LOAD(7, a0, x0.stride);
        TILE_DOT(1, 7, 6);
        if (tiles > 1) TILE_LOAD(7, a1, x1.stride);
        if (tiles > 1) TILE_DOT(3, 7, 6);
        if (tiles > 2) TILE_LOAD(7, a2, x2.stride);
        if (tiles > 2) TILE_DOT(5, 7, 6);
        if (more) decode_tile(w, step + AHEAD_STEPS, n + 1, (*next)[n + 1]);
        fetch(s);
    }
    enum { OUT_BYTES = KT_PANEL * sizeof(float) };
    float *c0 = out + first * KT_PANEL + 16 * n, *c1 = c0 + KT_TILE_ROWS * KT_PANEL, *c2 = c1 + KT_TILE_ROWS * KT_PANEL;
    TILE_STORE(0, c0, OUT_BYTES);
    TILE_STORE(1, c0 + 16, OUT_BYTES);
    if (tiles > 1) TILE_STORE(2, c1, OUT_BYTES);
    if (tiles > 1) TILE_STORE(3, c1 + 16, OUT_BYTES);
    if (tiles > 2) TILE_STORE(4, c2, OUT_BYTES);
    if (tiles > 2) TILE_STORE(5, c2 + 16, OUT_BYTES);
}

INLINE void many(const kt_dot *a) {
    const size_t steps = a->k / KT_GROUP, passes = (a->m + 3 * KT_TILE_ROWS - 1) / (3 * KT_TILE_ROWS);
    for (size_t p = 0; p < a->panels; p++) {
        const weights w = open_panel(a, p);
        const size_t bytes = (size_t)(step_at(&w, steps) - a->w[p]);
        const uint8_t *next = p + 1 < a->panels ? a->w[p + 1] : a->w[0] + bytes;
        stream s = {next, next + bytes, (bytes / LINE + passes * 2 * steps - 1) / (passes * 2 * steps)};
        size_t left = (a->m + KT_TILE_ROWS - 1) / KT_TILE_ROWS;
        for (size_t first = 0, tiles, pass = passes; pass; first += tiles * KT_TILE_ROWS, left -= tiles, pass--) {
            tiles = (left + pass - 1) / pass;
            for (int n = 0; n < WIDTH; n += 2) {
                if (tiles == 3) multiply(a, &w, first, 3, n, a->out[p], &s);
                if (tiles == 2) multiply(a, &w, first, 2, n, a->out[p], &s);
                if (tiles == 1) multiply(a, &w, first, 1, n, a->out[p], &s);
            }
        }
    }
}
