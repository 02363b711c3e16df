/* Packed panels times tiles of rows: the loop nest of the kernels that multiply with TDPBF16PS.
 *
 * SHAPES      m rows of k inputs, bf16, tiled (ktmoe.h); W packed panels of 64 columns; out fp32 [m][64]
 * DEFINITION  for each panel, column c, row i, w the sum of TERMS numbers:
 *                 in scale groups: out = 0; for each: sum = 0; its steps; out = fma(sum, scale[c], out)
 *                 else:      sum = 0, or out, if add; all steps; out = sum
 *             where a step is, for 32 k: for the terms of w in their order:
 *                     even = odd = 0; for the 16 pairs ascending: even = fma(x[k], w[k], even); odd = fma(x[k+1], w[k+1], odd)
 *                     sum = sum + (even + odd)
 *             each operation rounded to nearest even; all but the last fma takes and flushes denormals as zero: Intel SDM, TDPBF16PS
 * LAYOUT      the family's packing. A tile of B is 16 k-pairs of 16 columns: 32 k, a step; a panel has 4 a step, of each term.
 * REGULARITIES C stays in tiles over a scale group, and over all of k where scales are part of the weights, and is stored once.
 *             Rows beyond m are computed with whatever is there, and stored where nobody looks: one configuration does for all m.
 *
 * Three shapes of C, that each leave tiles for A and B: wide() 16 x 64, square() 32 x 32, tall() 48 x 32. Every pass decodes its
 * columns anew, while it multiplies: decoding a tile takes 34 cycles of the vector ports and TDPBF16PS 16 of its own, which goes on
 * beside them. The alternative, to decode a block of k once for all rows, has to put C aside between blocks: a spilled C of four
 * tiles took 90 ns, as long as 14 TDPBF16PS, and 64 KiB of decoded weights do not fit into L1 beside x.
 *
 * A kernel file defines, before it includes this:
 *     IN_PLACE                  1: packed weights are tiles of B, B_STRIDE bytes from k-pair to k-pair; nothing is decoded
 *     TERMS                     tiles of B whose sum is a step's weights: 1 or 2
 *     weights, open_panel(a, p, how)  what is needed of panel p all the time, with its steps (steps.h) as .at; how: scales.h's,
 *                               a constant at every call
 *     tile_at(w, step, n)       where the tile of columns 16 n to 16 n + 15 is packed
 *     tile_fold, load_tile_fold(w, step, n)     what decode_quarter() needs of a tile's scales
 *     decode_quarter(w, f, step, n, quarter, to)   k-pairs 4 quarter to 4 quarter + 3 of the tile; term t of them goes to
 *                               to + t * TILE_BYTES + quarter * QUARTER_BYTES
 */
#include "kernels/common/steps.h"
#include "kernels/common/tile.h"

enum {
    WIDTH = KT_PANEL / 16, /* tiles */
    OUT_BYTES = KT_PANEL * sizeof(float),
    QUARTERS = 4,
};
_Static_assert(LANES == 16, "a vector of scales is a tile's");

/* Decoded tiles go through a ring in L1: as small as may be, since what streams by evicts it, but large enough for a tile to have
 * left the store buffer when it is loaded. wide() has two steps there, the others PAIRS times two tiles of a step. */
enum {
    PAIRS = TERMS == 1 ? 4 : 3,
    PAIRS_AHEAD = PAIRS - 1,
    DECODED_BYTES = TERMS * TILE_BYTES, /* for 16 columns of a step */
    RING_BYTES = IN_PLACE ? 0 : 2 * WIDTH * DECODED_BYTES,
    SUMS_BYTES = 6 * TILE_BYTES, /* of a scale group, all tiles of C */
};

enum { B_BYTES = IN_PLACE ? B_STRIDE : TILE_ROW_BYTES };

INLINE const uint8_t *b_tile(const weights *w, const size_t step, const int n, const uint8_t *decoded) {
    return IN_PLACE ? tile_at(w, step, n) : decoded;
}

INLINE void decode_tile(const weights *w, const size_t step, const int n, uint8_t *to) {
    const tile_fold f = load_tile_fold(w, step, n);
#pragma GCC unroll 4
    for (int quarter = 0; quarter < QUARTERS; quarter++) decode_quarter(w, &f, step, n, quarter, to);
}

/* The tile of rows that begins at row `first`. A row alone has nothing behind it that may be read: it is loaded 16 times. */
typedef struct row_tile {
    const uint8_t *x;
    size_t step_bytes, stride, rows;
} row_tile;

INLINE row_tile rows_from(const kt_dot *a, const size_t first) {
    const size_t rows = least(KT_TILE_ROWS, a->m - first);
    return (row_tile){a->x[first], rows * TILE_ROW_BYTES, rows > 1 ? TILE_ROW_BYTES : 0, rows};
}

INLINE const uint8_t *a_tile(const row_tile *x, const size_t step) { return x->x + step * x->step_bytes; }

/* What is fetched to L2 while a panel is computed: the one after it, whole, a share at each of the places that call fetch(). Four
 * streams side by side: memory is read 1.2 times as fast as by one. */
typedef struct stream {
    const uint8_t *at;
    size_t stream_bytes;
    size_t lines, places, due;
} stream;

/* places: how often fetch() will be called. */
INLINE stream stream_after(const kt_dot *a, const weights *w, const size_t p, const size_t places) {
    const size_t steps = a->k / KT_BLOCK;
    const int last = p + 1 == a->panels;
    const size_t own_bytes = (size_t)(step_of(&w->at, steps - 1) - a->w[p]) + STEP_BYTES;
    const uint8_t *next = last ? a->next[0] : a->w[p + 1];
    const size_t bytes = !next ? 0 : last ? a->next_bytes : own_bytes, lines = (bytes + 4 * LINE - 1) / (4 * LINE);
    return (stream){next, lines * LINE, lines, places, 0};
}

INLINE void fetch(stream *s) {
    for (s->due += s->lines; s->due >= s->places; s->due -= s->places, s->at += LINE) {
        prefetch_l2(s->at);
        prefetch_l2(s->at + s->stream_bytes);
        prefetch_l2(s->at + 2 * s->stream_bytes);
        prefetch_l2(s->at + 3 * s->stream_bytes);
    }
}

/* Whether a scale group ends with this step, so that C has to be stored. */
INLINE int ends(const kt_dot *a, const weights *w, const size_t step, const scaling how) {
    return in_groups(how) && ((step + 1) >> w->at.group_shift != step >> w->at.group_shift || step + 1 == a->k / KT_BLOCK);
}

/* A scale group's sums in a tile of C, 16 columns of out. Only of rows that there are: others may be denormal, which is slow. */
INLINE void finish(const weights *w, const size_t step, const int n, const float *sums, const size_t rows, float *out,
                   const scaling how) {
    const f32v scale = load_scale(header_of(&w->at, step), n, (in_group){0}, NULL, how);
    const int first = step >> w->at.group_shift == 0;
    out += 16 * n;
    for (size_t i = 0; i < rows; i++, sums += 16, out += KT_PANEL)
        store_f32(out, scale_and_add(load_f32(sums), scale, first ? splat(0) : load_f32(out)));
}

/* Whether sums begin with what out holds. */
INLINE int adds(const kt_dot *a, const scaling how) { return kind_of(how) == NONE && a->add; }

#define STORE(t, to) TILE_STORE(t, to, OUT_BYTES)
#define BEGIN(t, from)                 \
    if (adds(a, how)) {                \
        TILE_LOAD(t, from, OUT_BYTES); \
    } else {                           \
        TILE_ZERO(t);                  \
    }
/* A tile of C, and an empty one again. */
#define TAKE(t)                                                     \
    TILE_STORE(t, sums + (t) * TILE_BYTES / 4, 16 * sizeof(float)); \
    TILE_ZERO(t)

/* A step of wide(): one tile of B after the other, decoded a step before. more: whether there is a next step. */
INLINE void wide_step(const weights *w, const row_tile *x, const size_t step, uint8_t *ring, stream *s, const int more) {
    const uint8_t *now = ring + step % 2 * WIDTH * DECODED_BYTES;
    uint8_t *next = ring + (step + 1) % 2 * WIDTH * DECODED_BYTES;
    TILE_LOAD(4, a_tile(x, step), x->stride);
/* Loads from memory come before those of a tile, which wait for stores: the other way round, 8 to 16 rows took 1.1 times as long. */
#define COLUMNS(n, b, b1)                                                                 \
    if (n % 2 == 0) fetch(s);                                                             \
    if (more) decode_tile(w, step + 1, n, next + n * DECODED_BYTES);                      \
    TILE_LOAD(b, b_tile(w, step, n, now + n * DECODED_BYTES), B_BYTES);                   \
    TILE_DOT(n, 4, b);                                                                    \
    if (TERMS == 2) {                                                                     \
        TILE_LOAD(b1, b_tile(w, step, n, now + n * DECODED_BYTES + TILE_BYTES), B_BYTES); \
        TILE_DOT(n, 4, b1);                                                               \
    }
    COLUMNS(0, 6, 5)
    COLUMNS(1, 7, 6)
    COLUMNS(2, 6, 5)
    COLUMNS(3, 7, 6)
#undef COLUMNS
}

/* Rows [first, first + 16), all columns of a panel. */
INLINE void wide(const kt_dot *a, const weights *w, const size_t first, float *out, stream *s, const scaling how) {
    uint8_t *ring = a->scratch;
    float *sums = (float *)(ring + RING_BYTES);
    const size_t steps = a->k / KT_BLOCK;
    const row_tile x = rows_from(a, first);
    out += first * KT_PANEL;
    for (int n = 0; n < WIDTH && !IN_PLACE; n++) decode_tile(w, 0, n, ring + n * DECODED_BYTES);
    BEGIN(0, out);
    BEGIN(1, out + 16);
    BEGIN(2, out + 32);
    BEGIN(3, out + 48);
    for (size_t step = 0; step < steps; step++) {
        if (!IN_PLACE && step + 1 < steps)
            wide_step(w, &x, step, ring, s, 1);
        else
            wide_step(w, &x, step, ring, s, 0);
        if (ends(a, w, step, how)) {
            TAKE(0);
            TAKE(1);
            TAKE(2);
            TAKE(3);
            for (int n = 0; n < WIDTH; n++) finish(w, step, n, sums + n * TILE_BYTES / 4, x.rows, out, how);
        }
    }
    if (in_groups(how)) return;
    STORE(0, out);
    STORE(1, out + 16);
    STORE(2, out + 32);
    STORE(3, out + 48);
}

INLINE void few(const kt_dot *a, const scaling how) {
    for (size_t p = 0; p < a->panels; p++) {
        const weights w = open_panel(a, p, how);
        stream s = stream_after(a, &w, p, 2 * (a->k / KT_BLOCK));
        wide(a, &w, 0, a->out[p], &s, how);
    }
}

/* What the larger shapes do between multiplications: a share of the two tiles that are decoded ahead, and of the next step's A,
 * which comes to L1; behind a row alone, whose next steps these are, nothing is lost. dot: of so many. */
INLINE void between(const weights *w, const row_tile *x, const int tiles, const size_t step, const int n, const tile_fold f[2],
                    uint8_t *next, const int dot, const int dots, const int more) {
    const int quarters = more ? 2 * QUARTERS : 0;
#pragma GCC unroll 8
    for (int q = dot * quarters / dots; q < (dot + 1) * quarters / dots; q++)
        decode_quarter(w, &f[q / QUARTERS], step + PAIRS_AHEAD, n + q / QUARTERS, q % QUARTERS,
                       next + q / QUARTERS * DECODED_BYTES);
    const int lines = tiles * KT_TILE_ROWS, line = dot * lines / dots;
    const uint8_t *ahead = a_tile(&x[line / KT_TILE_ROWS], step + 1) + line % KT_TILE_ROWS * TILE_ROW_BYTES;
    __asm__("" : "+r"(ahead)); /* GCC 12 would keep a pointer for each line */
#pragma GCC unroll 16
    for (int i = 0; i < lines / dots; i++) prefetch_l1(ahead + i * TILE_ROW_BYTES);
}

#define PAIR_STEP()                                                          \
    const uint8_t *now = ring + step % PAIRS * 2 * DECODED_BYTES;            \
    uint8_t *next = ring + (step + PAIRS_AHEAD) % PAIRS * 2 * DECODED_BYTES; \
    tile_fold f[2];                                                          \
    for (int i = 0; i < 2 && more; i++) f[i] = load_tile_fold(w, step + PAIRS_AHEAD, n + i)
#define LOAD_A(t, i) TILE_LOAD(t, a_tile(&x[i], step), x[i].stride)
#define LOAD_B(t, i, term) TILE_LOAD(t, b_tile(w, step, n + i, now + (i * TERMS + term) * TILE_BYTES), B_BYTES)

/* A step of square(). more: whether there is one PAIRS_AHEAD further. */
INLINE void square_step(const weights *w, const row_tile x[2], const size_t step, const int n, uint8_t *ring, const int more) {
    PAIR_STEP();
#define DOT(c, a_, b, dot) \
    TILE_DOT(c, a_, b);    \
    between(w, x, 2, step, n, f, next, dot, 4 * TERMS, more)
    LOAD_A(4, 0);
    LOAD_B(6, 0, 0);
    DOT(0, 4, 6, 0);
    LOAD_A(5, 1);
    DOT(2, 5, 6, 1);
    if (TERMS == 2) {
        LOAD_B(7, 0, 1);
        DOT(0, 4, 7, 2);
        DOT(2, 5, 7, 3);
        LOAD_B(6, 1, 0);
        DOT(1, 4, 6, 4);
        DOT(3, 5, 6, 5);
    }
    LOAD_B(7, 1, TERMS - 1);
    DOT(1, 4, 7, 4 * TERMS - 2);
    DOT(3, 5, 7, 4 * TERMS - 1);
#undef DOT
}

/* Rows [first, first + 32), columns 16 n to 16 n + 31 of a panel. */
INLINE void square(const kt_dot *a, const weights *w, const size_t first, const int n, float *out, stream *s,
                   const scaling how) {
    uint8_t *ring = a->scratch;
    float *sums = (float *)(ring + RING_BYTES);
    const size_t steps = a->k / KT_BLOCK;
    const row_tile x[2] = {rows_from(a, first), rows_from(a, first + KT_TILE_ROWS)};
    float *upper = out + first * KT_PANEL, *lower = upper + KT_TILE_ROWS * KT_PANEL;
    for (size_t step = 0; step < least(PAIRS_AHEAD, steps) && !IN_PLACE; step++)
        for (int i = 0; i < 2; i++) decode_tile(w, step, n + i, ring + (step * 2 + i) * DECODED_BYTES);
    BEGIN(0, upper + 16 * n);
    BEGIN(1, upper + 16 * n + 16);
    BEGIN(2, lower + 16 * n);
    BEGIN(3, lower + 16 * n + 16);
    for (size_t step = 0; step < steps; step++) {
        if (!IN_PLACE && step + PAIRS_AHEAD < steps)
            square_step(w, x, step, n, ring, 1);
        else
            square_step(w, x, step, n, ring, 0);
        fetch(s);
        if (ends(a, w, step, how)) {
            TAKE(0);
            TAKE(1);
            TAKE(2);
            TAKE(3);
            for (int t = 0; t < 4; t++)
                finish(w, step, n + t % 2, sums + t * TILE_BYTES / 4, x[t / 2].rows, t / 2 ? lower : upper, how);
        }
    }
    if (in_groups(how)) return;
    STORE(0, upper + 16 * n);
    STORE(1, upper + 16 * n + 16);
    STORE(2, lower + 16 * n);
    STORE(3, lower + 16 * n + 16);
}

/* A step of tall(): each tile of B goes over the tiles of A in the other direction than the one before. */
INLINE void tall_step(const weights *w, const row_tile x[3], const size_t step, const int n, uint8_t *ring, const int more) {
    PAIR_STEP();
#define DOT(c, dot)    \
    TILE_DOT(c, 7, 6); \
    between(w, x, 3, step, n, f, next, dot, 6 * TERMS, more)
#define DOWN(c0, c1, c2, dot) \
    LOAD_A(7, 0);             \
    DOT(c0, dot);             \
    LOAD_A(7, 1);             \
    DOT(c1, dot + 1);         \
    LOAD_A(7, 2);             \
    DOT(c2, dot + 2)
#define UP(c0, c1, c2, dot) \
    DOT(c2, dot);           \
    LOAD_A(7, 1);           \
    DOT(c1, dot + 1);       \
    LOAD_A(7, 0);           \
    DOT(c0, dot + 2)
    LOAD_B(6, 0, 0);
    DOWN(0, 2, 4, 0);
    if (TERMS == 1) {
        LOAD_B(6, 1, 0);
        UP(1, 3, 5, 3);
        return;
    }
    LOAD_B(6, 0, 1);
    UP(0, 2, 4, 3);
    LOAD_B(6, 1, 0);
    DOT(1, 6);
    LOAD_A(7, 1);
    DOT(3, 7);
    LOAD_A(7, 2);
    DOT(5, 8);
    LOAD_B(6, 1, 1);
    UP(1, 3, 5, 9);
#undef UP
#undef DOWN
#undef DOT
}

/* Rows [first, first + 48), columns 16 n to 16 n + 31 of a panel: one tile is left for A and one for B, so that A is loaded
 * twice, the second time from L1. */
INLINE void tall(const kt_dot *a, const weights *w, const size_t first, const int n, float *out, stream *s, const scaling how) {
    uint8_t *ring = a->scratch;
    float *sums = (float *)(ring + RING_BYTES);
    const size_t steps = a->k / KT_BLOCK;
    const row_tile x[3] = {rows_from(a, first), rows_from(a, first + KT_TILE_ROWS), rows_from(a, first + 2 * KT_TILE_ROWS)};
    float *upper = out + first * KT_PANEL, *middle = upper + KT_TILE_ROWS * KT_PANEL;
    float *lower = middle + KT_TILE_ROWS * KT_PANEL;
    for (size_t step = 0; step < least(PAIRS_AHEAD, steps) && !IN_PLACE; step++)
        for (int i = 0; i < 2; i++) decode_tile(w, step, n + i, ring + (step * 2 + i) * DECODED_BYTES);
    BEGIN(0, upper + 16 * n);
    BEGIN(1, upper + 16 * n + 16);
    BEGIN(2, middle + 16 * n);
    BEGIN(3, middle + 16 * n + 16);
    BEGIN(4, lower + 16 * n);
    BEGIN(5, lower + 16 * n + 16);
    for (size_t step = 0; step < steps; step++) {
        if (!IN_PLACE && step + PAIRS_AHEAD < steps)
            tall_step(w, x, step, n, ring, 1);
        else
            tall_step(w, x, step, n, ring, 0);
        fetch(s);
        if (ends(a, w, step, how)) {
            TAKE(0);
            TAKE(1);
            TAKE(2);
            TAKE(3);
            TAKE(4);
            TAKE(5);
            for (int t = 0; t < 6; t++)
                finish(w, step, n + t % 2, sums + t * TILE_BYTES / 4, x[t / 2].rows, upper + t / 2 * KT_TILE_ROWS * KT_PANEL,
                       how);
        }
    }
    if (in_groups(how)) return;
    STORE(0, upper + 16 * n);
    STORE(1, upper + 16 * n + 16);
    STORE(2, middle + 16 * n);
    STORE(3, middle + 16 * n + 16);
    STORE(4, lower + 16 * n);
    STORE(5, lower + 16 * n + 16);
}

/* Two tiles of rows at a time, the last three together: a tile alone would be decoded for as long as two are multiplied. */
INLINE void many(const kt_dot *a, const scaling how) {
    const size_t steps = a->k / KT_BLOCK, tiles = (a->m + KT_TILE_ROWS - 1) / KT_TILE_ROWS;
    const size_t passes = tiles > 1 ? tiles / 2 : 1;
    for (size_t p = 0; p < a->panels; p++) {
        const weights w = open_panel(a, p, how);
        stream s = stream_after(a, &w, p, 2 * steps * passes);
        for (size_t done = 0, now; done < tiles; done += now) {
            const size_t left = tiles - done;
            now = left == 3 ? 3 : least(left, 2);
            for (int n = 0; n < WIDTH && now == 3; n += 2) tall(a, &w, done * KT_TILE_ROWS, n, a->out[p], &s, how);
            for (int n = 0; n < WIDTH && now == 2; n += 2) square(a, &w, done * KT_TILE_ROWS, n, a->out[p], &s, how);
            if (now == 1) wide(a, &w, 0, a->out[p], &s, how);
        }
    }
}

#include "kernels/loops/transposed.h"

/* few_<name>(), many_<name>() and transpose_<name>() for one way of scaling, and what a kernel's row says of them. */
#define FUNCTIONS(name, how)                                   \
    static void few_##name(const kt_dot *a) { few(a, how); }   \
    static void many_##name(const kt_dot *a) { many(a, how); } \
    TRANSPOSED(name, how, OPERAND_OF(how))
#define SERVED_BY(name)                                                                                                      \
    .rows = &KT_FORM(rows_bf16_tiles), .few_max = KT_TILE_ROWS, .scratch_bytes = RING_BYTES + SUMS_BYTES, .few = few_##name, \
    .many = many_##name TRANSPOSED_BY(name)
