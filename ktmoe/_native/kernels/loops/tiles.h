/* Packed panels times tiles of rows: the loop nest of the kernels that multiply with TDPBF16PS.
 *
 * SHAPES      m rows of k inputs, bf16, tiled (ktmoe.h); W packed panels of 64 columns; out fp32 [m][64]
 * DEFINITION  for each panel, column c, row i:
 *                 out = 0; for each 32 k ascending:
 *                     even = odd = 0; for the 16 pairs ascending: even = fma(x[k], w[k], even); odd = fma(x[k+1], w[k+1], odd)
 *                     out = out + (even + odd)
 *             each step rounded to nearest even, denormals taken as and flushed to zero: Intel SDM, TDPBF16PS
 * LAYOUT      the family's packing. A tile of B is 16 k-pairs of 16 columns: 32 k, a step; a panel has 4 a step.
 * REGULARITIES scales are part of the weights, so that C stays in tiles over all of k, whatever a scale group is, and is stored once.
 *             Rows beyond m are computed with whatever is there, and stored where nobody looks: one configuration does for all m.
 *
 * Three shapes of C, that each leave tiles for A and B: wide() 16 x 64, square() 32 x 32, tall() 48 x 32. Every pass decodes its
 * columns anew, while it multiplies: decoding a tile takes 34 cycles of the vector ports and TDPBF16PS 16 of its own, which goes on
 * beside them. The alternative, to decode a block of k once for all rows, has to put C aside between blocks: a spilled C of four
 * tiles took 90 ns, as long as 14 TDPBF16PS, and 64 KiB of decoded weights do not fit into L1 beside x.
 *
 * A kernel file defines, before it includes this:
 *     IN_PLACE                  1: packed weights are tiles of B, B_STRIDE bytes from k-pair to k-pair; decode_tile() is not used
 *     STEP_BYTES                of a packed panel, from the last step_at() to its end
 *     weights, open_panel(a, p, how)  what is needed of panel p all the time; how: scales.h's, a constant at every call
 *     step_at(w, step)          where the packed step is
 *     tile_at(w, step, n)       and a tile of it, columns 16 n to 16 n + 15
 *     decode_tile(w, step, n, to)
 */
#include "kernels/common/scales.h"
#include "kernels/common/tile.h"

enum {
    WIDTH = KT_PANEL / 16,  /* tiles */
    FEW_AHEAD_BYTES = 2048, /* of a panel, between what few() uses and what it prefetches to L1 */
    OUT_BYTES = KT_PANEL * sizeof(float),
};

/* Decoded tiles go through a ring of 8 in L1: as few as may be, since what streams by evicts them, but enough for a tile to have
 * left the store buffer when it is loaded. */
typedef uint8_t step_tiles[WIDTH][TILE_BYTES]; /* 2: all of a step */
typedef uint8_t pair_tiles[2][TILE_BYTES];     /* PAIRS: two of a step */
enum { PAIRS = 4, PAIRS_AHEAD = 3, RING_BYTES = IN_PLACE ? 0 : 8 * TILE_BYTES };

INLINE const uint8_t *b_tile(const weights *w, const size_t step, const int n, const uint8_t *decoded) {
    return IN_PLACE ? tile_at(w, step, n) : decoded;
}

enum { B_BYTES = IN_PLACE ? B_STRIDE : TILE_ROW_BYTES };

/* The tile of rows that begins at row `first`. A row alone has nothing behind it that may be read: it is loaded 16 times. */
typedef struct row_tile {
    const uint8_t *x;
    size_t step_bytes, stride;
} row_tile;

INLINE row_tile rows_from(const kt_dot *a, const size_t first) {
    const size_t together = least(KT_TILE_ROWS, a->m - first);
    return (row_tile){a->x[first], together * TILE_ROW_BYTES, together > 1 ? TILE_ROW_BYTES : 0};
}

/* Some of a step's lines, as many for each tile, a given distance ahead. */
INLINE void fetch_ahead(const weights *w, const size_t step, const int n) {
    const uint8_t *from = step_at(w, step);
    const size_t lines = (size_t)(step_at(w, step + 1) - from) / LINE;
    for (size_t line = n * lines / WIDTH; line < (n + 1) * lines / WIDTH; line++)
        prefetch_l1(from + FEW_AHEAD_BYTES + line * LINE);
}

/* Rows [first, first + 16), all columns of a panel: a step's four tiles of B take turns in two. */
INLINE void wide(const kt_dot *a, const weights *w, const size_t first, float *out) {
    step_tiles *ring = a->scratch;
    const size_t steps = a->k / KT_BLOCK;
    const row_tile x = rows_from(a, first);
    for (int n = 0; n < WIDTH && !IN_PLACE; n++) decode_tile(w, 0, n, ring[0][n]);
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (size_t step = 0; step < steps; step++) {
        const step_tiles *now = &ring[step % 2];
        step_tiles *next = &ring[(step + 1) % 2];
        const int more = !IN_PLACE && step + 1 < steps;
/* Loads from memory come before those of a tile, which wait for stores: the other way round, 8 to 16 rows took 1.1 times as long. */
#define COLUMNS(n, b)                                     \
    fetch_ahead(w, step, n);                              \
    if (more) decode_tile(w, step + 1, n, (*next)[n]);    \
    TILE_LOAD(b, b_tile(w, step, n, (*now)[n]), B_BYTES); \
    TILE_DOT(n, 4, b)
        TILE_LOAD(4, x.x + step * x.step_bytes, x.stride);
        COLUMNS(0, 6);
        COLUMNS(1, 7);
        COLUMNS(2, 6);
        COLUMNS(3, 7);
#undef COLUMNS
    }
    out += first * KT_PANEL;
    TILE_STORE(0, out, OUT_BYTES);
    TILE_STORE(1, out + 16, OUT_BYTES);
    TILE_STORE(2, out + 32, OUT_BYTES);
    TILE_STORE(3, out + 48, OUT_BYTES);
}

INLINE void few(const kt_dot *a, const scaling how) {
    for (size_t p = 0; p < a->panels; p++) {
        const weights w = open_panel(a, p, how);
        wide(a, &w, 0, a->out[p]);
    }
}

/* What many() prefetches to L2 while it works on a panel: the next one, some with each step. Nearer, prefetches and the loads of
 * x from L2 would wait for the same few line buffers. */
typedef struct stream {
    const uint8_t *at, *end;
    size_t each;
} stream;

INLINE void fetch(stream *s) {
    for (size_t line = 0; line < s->each && s->at < s->end; line++, s->at += LINE) prefetch_l2(s->at);
}

/* Rows [first, first + 32), columns 16 n to 16 n + 31 of a panel. */
INLINE void square(const kt_dot *a, const weights *w, const size_t first, const int n, float *out, stream *s) {
    pair_tiles *ring = a->scratch;
    const size_t steps = a->k / KT_BLOCK;
    const row_tile x0 = rows_from(a, first), x1 = rows_from(a, first + KT_TILE_ROWS);
    for (size_t step = 0; step < least(PAIRS_AHEAD, steps) && !IN_PLACE; step++)
        for (int i = 0; i < 2; i++) decode_tile(w, step, n + i, ring[step][i]);
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (size_t step = 0; step < steps; step++) {
        uint8_t (*now)[TILE_BYTES] = ring[step % PAIRS], (*next)[TILE_BYTES] = ring[(step + PAIRS_AHEAD) % PAIRS];
        const int more = !IN_PLACE && step + PAIRS_AHEAD < steps;
        TILE_LOAD(4, x0.x + step * x0.step_bytes, x0.stride);
        TILE_LOAD(6, b_tile(w, step, n, now[0]), B_BYTES);
        TILE_DOT(0, 4, 6);
        TILE_LOAD(5, x1.x + step * x1.step_bytes, x1.stride);
        TILE_DOT(2, 5, 6);
        if (more) decode_tile(w, step + PAIRS_AHEAD, n, next[0]);
        TILE_LOAD(7, b_tile(w, step, n + 1, now[1]), B_BYTES);
        TILE_DOT(1, 4, 7);
        TILE_DOT(3, 5, 7);
        if (more) decode_tile(w, step + PAIRS_AHEAD, n + 1, next[1]);
        fetch(s);
    }
    float *upper = out + first * KT_PANEL + 16 * n, *lower = upper + KT_TILE_ROWS * KT_PANEL;
    TILE_STORE(0, upper, OUT_BYTES);
    TILE_STORE(1, upper + 16, OUT_BYTES);
    TILE_STORE(2, lower, OUT_BYTES);
    TILE_STORE(3, lower + 16, OUT_BYTES);
}

/* Rows [first, first + 48), columns 16 n to 16 n + 31 of a panel: one tile is left for A and one for B, so that A is loaded
 * twice, the second time from L1. It multiplies 1.15 times as fast as square(), since decoding serves more rows. */
INLINE void tall(const kt_dot *a, const weights *w, const size_t first, const int n, float *out, stream *s) {
    pair_tiles *ring = a->scratch;
    const size_t steps = a->k / KT_BLOCK;
    const row_tile x0 = rows_from(a, first), x1 = rows_from(a, first + KT_TILE_ROWS),
                   x2 = rows_from(a, first + 2 * KT_TILE_ROWS);
    for (size_t step = 0; step < least(PAIRS_AHEAD, steps) && !IN_PLACE; step++)
        for (int i = 0; i < 2; i++) decode_tile(w, step, n + i, ring[step][i]);
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    TILE_ZERO(4);
    TILE_ZERO(5);
    for (size_t step = 0; step < steps; step++) {
        uint8_t (*now)[TILE_BYTES] = ring[step % PAIRS], (*next)[TILE_BYTES] = ring[(step + PAIRS_AHEAD) % PAIRS];
        const int more = !IN_PLACE && step + PAIRS_AHEAD < steps;
        TILE_LOAD(6, b_tile(w, step, n, now[0]), B_BYTES);
        TILE_LOAD(7, x0.x + step * x0.step_bytes, x0.stride);
        TILE_DOT(0, 7, 6);
        TILE_LOAD(7, x1.x + step * x1.step_bytes, x1.stride);
        TILE_DOT(2, 7, 6);
        TILE_LOAD(7, x2.x + step * x2.step_bytes, x2.stride);
        TILE_DOT(4, 7, 6);
        if (more) decode_tile(w, step + PAIRS_AHEAD, n, next[0]);
        TILE_LOAD(6, b_tile(w, step, n + 1, now[1]), B_BYTES);
        TILE_DOT(5, 7, 6);
        TILE_LOAD(7, x1.x + step * x1.step_bytes, x1.stride);
        TILE_DOT(3, 7, 6);
        TILE_LOAD(7, x0.x + step * x0.step_bytes, x0.stride);
        TILE_DOT(1, 7, 6);
        if (more) decode_tile(w, step + PAIRS_AHEAD, n + 1, next[1]);
        fetch(s);
    }
    float *upper = out + first * KT_PANEL + 16 * n, *middle = upper + KT_TILE_ROWS * KT_PANEL;
    float *lower = middle + KT_TILE_ROWS * KT_PANEL;
    TILE_STORE(0, upper, OUT_BYTES);
    TILE_STORE(1, upper + 16, OUT_BYTES);
    TILE_STORE(2, middle, OUT_BYTES);
    TILE_STORE(3, middle + 16, OUT_BYTES);
    TILE_STORE(4, lower, OUT_BYTES);
    TILE_STORE(5, lower + 16, OUT_BYTES);
}

/* Three tiles of rows at a time, but for a rest of 2 and one of 4, which is done in twos. A single one is few()'s, as a rule. */
INLINE void many(const kt_dot *a, const scaling how) {
    const size_t steps = a->k / KT_BLOCK, tiles = (a->m + KT_TILE_ROWS - 1) / KT_TILE_ROWS;
    for (size_t p = 0; p < a->panels; p++) {
        const weights w = open_panel(a, p, how);
        const size_t bytes = (size_t)(step_at(&w, steps - 1) - a->w[p]) + STEP_BYTES;
        const uint8_t *next = p + 1 < a->panels ? a->w[p + 1] : a->next[0];
        stream s = {next, next ? next + bytes : NULL, bytes / LINE / ((tiles + 2) / 3 * 2 * steps) + 1};
        for (size_t done = 0, now; done < tiles; done += now) {
            const size_t left = tiles - done;
            now = left == 4 || left == 2 ? 2 : left == 1 ? 1 : 3;
            for (int n = 0; n < WIDTH && now == 3; n += 2) tall(a, &w, done * KT_TILE_ROWS, n, a->out[p], &s);
            for (int n = 0; n < WIDTH && now == 2; n += 2) square(a, &w, done * KT_TILE_ROWS, n, a->out[p], &s);
            if (now == 1) wide(a, &w, done * KT_TILE_ROWS, a->out[p]);
        }
    }
}

/* few_<name>() and many_<name>() for one way of scaling, and what a kernel's row says of them. */
#define FUNCTIONS(name, how)                                 \
    static void few_##name(const kt_dot *a) { few(a, how); } \
    static void many_##name(const kt_dot *a) { many(a, how); }
#define SERVED_BY(name)                                                                                         \
    .rows = &KT_NAME(rows_bf16_tiles), .few_max = KT_TILE_ROWS, .scratch_bytes = RING_BYTES, .few = few_##name, \
    .many = many_##name
