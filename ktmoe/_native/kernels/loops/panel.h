/* Packed panels times rows: the loop nest of the kernels on vectors.
 *
 * SHAPES      m rows of k inputs, in the form that their kernel takes; W packed panels of 64 columns; out fp32 [m][64]
 * DEFINITION  for each panel, column c, row i:
 *                 in scale groups: for each: sum = 0; for k ascending: sum = dot(sum, w[c][k], x[i][k])
 *                            out = finish(sum, scale[c], out), rounded once; where there are minima, out -= minimum[c] * sum of
 *                            the group's x, rounded once
 *                 else:      out = 0, unless add; for k ascending: out = dot(out, w[c][k], x[i][k])
 * LAYOUT      the family's packing. Decoded: strips of TILE_VECTORS vectors of columns, each [step][columns] dwords.
 * REGULARITIES lane = column: a dword of x, one step of k, is broadcast; nothing is shuffled after the lookup; every m sums in
 *             the same order. Totals of scale groups stay in out, so that the registers hold chains, or a tile has registers for both.
 *
 * few():  weights go straight from the packed codes to registers and serve all rows of a pass; rows * vectors chains hide the
 *         latency of dot().
 * many(): DECODE_K k of a panel are decoded once; then TILE_ROWS rows at a time run over each strip, which stays in L1.
 *
 * A kernel file defines, before it includes this:
 *     STEP_K                    k in a dword of x and of the decoded weights: 1 of fp32, 2 of 16 bits, 4 of 8 bits
 *     DECODE_K                  of many(), a multiple of KT_SCALE_GROUP_MAX: a decoded strip leaves half of an L1 to x
 *     TILE_ROWS, TILE_VECTORS   of a tile of many()
 *     FEW_ROWS                  of a pass of few(), and PASSES(PASS), the (rows, vectors) that few() makes them of
 *     FEW_MAX                   rows up to which few() is the faster, in one pass or more; 0: never
 *     BLOCK_BYTES               of 32 k of a packed panel, without scales; a family of several sizes of codes: of the largest
 *     IN_PLACE                  1: packed weights are as decode() would leave them, with all vectors in one strip
 *     BY_VECTOR                 1: few() does a vector's steps one after another, since they share what decode() does, and dot()
 *                               has a latency of 1; 0: a step's vectors, so that chains take turns
 *     EIGHTS_APART              1: few() loads nothing of a block's next 8 k before it is done with one: decode() needs many registers
 *     BLOCK_SUMS                1: a scale group's sum is finished with every block, since x has a scale for each
 *     HOLD_TOTALS               1: a tile of many() keeps its scale groups' totals in registers beside the sums; 0: in out
 *     HOLD_HALVES               1: where scales are of 16 k, or there are minima, it does so, too, for half of the strip at a time
 *     table, load_table(codebook, how)   what decode() needs all the time
 *     fold_columns(header, v, how)     what it needs of a group's scales or zero points: a dword for each column of vector v
 *     fold, fold_of(u32v, how)         such dwords, as it takes them
 *     decode(p, v, j, how, t, f)       u32v of the weights of step j of the 8 k at p, in the columns of vector v
 *     sums                      the type of a vector of sums; dot(sums, u32v w, u32v x, how)
 *     start(x, k, block, span, t, how)  a sum before its first step: x is a row of k, its block the first one; span 0: a sum of whole
 *                               blocks, 1 or 2: of the block's first or last 16 k
 *     factor(x, k, block, t)    f32v of what finish() takes of a block of x
 *     finish(sums, f32v scale, f32v factor, f32v out)
 *     x_sum(x, k, block, span)  f32v of the sum of x that a minimum multiplies; span: start()'s
 * and how scales are loaded, in scales.h or in a way of its own.
 *
 * EXPANDS 1: what is packed are records of KT_SUPER_GROUP k, which become such panels in L1, one at a time. Then it has, too,
 *     EXPANDED_BYTES, at most, of one; RECORD_BLOCKS
 *     expand(codebook, panel, number, count, to, how)    blocks of one record, from block `number` of a panel on, to where they would
 *                               stand in a panel of this record alone
 */
#include "kernels/common/expands.h"
#include "kernels/common/headers.h"
#include "kernels/common/place.h"

enum {
    STEPS = KT_BLOCK / STEP_K, /* of a block */
    BLOCKS = DECODE_K / KT_BLOCK,
    STRIP = TILE_VECTORS * LANES,
    STRIPS = KT_PANEL / STRIP,
    BOTH = 2 * VECTORS, /* panels */
    OCTET = 8 / STEP_K, /* steps that share a vector of 4-bit codes */
    AHEAD_BYTES = 4096, /* of a panel, between what few() uses and what it prefetches to L1 */
};

_Static_assert(TILE_ROWS <= 12, "TILE() has a case for each number of rows");
_Static_assert(STRIPS == 1 || !IN_PLACE, "packed weights in place are one strip");
_Static_assert(DECODE_K % KT_SCALE_GROUP_MAX == 0, "a scale group is not cut");

/* Whether out is added up from sums that are finished apart: those of scale groups, or of blocks that x has scales for. */
INLINE int has_sums(const scaling how) { return BLOCK_SUMS || in_groups(how); }

/* Lines of a quarter of a block, for each 8 k. */
INLINE int octet_lines(const scaling how) { return (int)(block_bytes(how) / 4 / LINE); }

/* Whether sums begin with what out holds. */
INLINE int adds(const kt_dot *a, const scaling how) { return kind_of(how) == NONE && !BLOCK_SUMS && a->add; }

/* The span of a half of a block: 0, the whole block, where scales are of more than 16 k; else 1 or 2. */
INLINE int span_of(const int half, const scaling how) { return halves(how) - 1 + half; }

/* The k that a pass goes over; a->w begins with them. */
typedef struct range {
    size_t begin, end;
} range;

/* rows x (vectors * LANES columns) straight from the codes: from vector v0 of one panel, or BOTH panels. All but a, ks and first are
 * constants at every call. */
INLINE void pass(const kt_dot *restrict a, const range ks, const size_t first, const int rows, const int panel, const int v0,
                 const int vectors, const scaling how) {
    const table t = load_table(a->codebook, how);
    const uint8_t *w[2] = {a->w[panel], a->w[vectors == BOTH ? 1 : panel]};
    const uint32_t *x[FEW_ROWS];
    float *out[2] = {a->out[panel] + first * KT_PANEL, a->out[vectors == BOTH ? 1 : panel] + first * KT_PANEL};
    sums sum[FEW_ROWS][BOTH];
/* The hardware does not fetch ahead far enough where decoding takes long: without this, reading and computing add up. In ascending
 * order, since that is what the hardware helps with, and one line at a time, since a prefetch that finds all fill buffers taken holds
 * up what is behind it. A pass over a panel's first columns does it for all of them. Weights in place are read so fast that the fill
 * buffers of L1 would bound it: the hardware fetches more of them, to L2. */
#define FETCH(slot, slots)                                                        \
    for (int line = (slot), lines = (vectors == BOTH ? 2 : 1) * octet_lines(how); \
         !IN_PLACE && !EXPANDS && v0 == 0 && line < lines; line += (slots))       \
    prefetch_l1(w[line / octet_lines(how)] + AHEAD_BYTES + (octet * octet_lines(how) + line % octet_lines(how)) * LINE)
#define OUT(i, v) (out[(v) / VECTORS] + (i) * KT_PANEL + (v0 + (v) % VECTORS) * LANES)
    for (int i = 0; i < rows; i++) {
        x[i] = a->x[first + i];
        for (int v = 0; v < vectors; v++) {
            sum[i][v] = start(x[i], a->k, 0, 0, &t, how);
            if (has_sums(how) && !ks.begin) store_f32(OUT(i, v), splat(0));
            if (adds(a, how)) sum[i][v] = (sums)load_f32(OUT(i, v));
        }
    }
    const size_t per = blocks_per_header(a->scale_group, how);
    supers super[BOTH] = {0};
    for (size_t k = ks.begin; k < ks.end;) {
        size_t bytes = header_bytes(how);
        if (how & SUPER && k % KT_SUPER_GROUP == 0) {
            for (int v = 0; v < vectors; v++) super[v] = load_supers(w[v / VECTORS], v0 + v % VECTORS, how);
            for (size_t line = 0; !EXPANDS && line < super_bytes(how); line += LINE)
                for (int p = 0; p < (vectors == BOTH ? 2 : 1); p++) prefetch_l1(w[p] + AHEAD_BYTES + line);
            w[0] += super_bytes(how), w[1] += super_bytes(how);
        }
        const uint8_t *header[2] = {w[0], w[1]};
        for (size_t line = 0; !EXPANDS && line < bytes; line += LINE)
            for (int p = 0; p < (vectors == BOTH ? 2 : 1); p++) prefetch_l1(w[p] + AHEAD_BYTES + line);
        w[0] += bytes, w[1] += bytes;
        fold f[BOTH];
        if (folds(how))
            for (int v = 0; v < vectors; v++) f[v] = fold_of(fold_columns(header[v / VECTORS], v0 + v % VECTORS, how), how);
        const size_t blocks = least(per, (ks.end - k) / KT_BLOCK);
        for (size_t b = 0; b < blocks; b++, k += KT_BLOCK) {
            for (int half = 0; half < halves(how); half++) {
                if (has_sums(how) && (BLOCK_SUMS || how & HALVES || !b))
                    for (int i = 0; i < rows; i++)
                        for (int v = 0; v < vectors; v++)
                            sum[i][v] = start(x[i], a->k, k / KT_BLOCK, span_of(half, how), &t, how);
                const int octets = KT_BLOCK / 8 / halves(how);
#pragma GCC unroll 1
                for (int octet = half * octets; octet < (half + 1) * octets; octet++) {
                    const place at[2] = {{w[0], k / KT_BLOCK, octet}, {w[1], k / KT_BLOCK, octet}};
                    const size_t x_at = (k + octet * 8) / STEP_K;
                    if (EIGHTS_APART) __asm__ volatile("" : : : "memory");
#pragma GCC unroll 8
                    for (int j = 0; j < OCTET && !BY_VECTOR; j++) {
                        FETCH(j, OCTET);
                        u32v wj[BOTH];
                        for (int v = 0; v < vectors; v++) wj[v] = decode(&at[v / VECTORS], v0 + v % VECTORS, j, how, &t, &f[v]);
                        for (int i = 0; i < rows; i++) {
                            const u32v xj = broadcast(x[i] + x_at + j);
                            for (int v = 0; v < vectors; v++) sum[i][v] = dot(sum[i][v], wj[v], xj, how);
                        }
                    }
#pragma GCC unroll 8
                    for (int v = 0; v < vectors && BY_VECTOR; v++) {
                        FETCH(v, vectors);
#pragma GCC unroll 8
                        for (int j = 0; j < OCTET; j++) {
                            const u32v wj = decode(&at[v / VECTORS], v0 + v % VECTORS, j, how, &t, &f[v]);
                            for (int i = 0; i < rows; i++) sum[i][v] = dot(sum[i][v], wj, broadcast(x[i] + x_at + j), how);
                        }
                        __asm__ volatile("" : : : "memory"); /* x is broadcast again, so that sums keep their registers */
                    }
                }
                if (!has_sums(how) || (!BLOCK_SUMS && !(how & HALVES) && b + 1 < blocks)) continue;
                f32v of_x[FEW_ROWS];
                for (int i = 0; i < rows; i++) of_x[i] = factor(x[i], a->k, k / KT_BLOCK, &t);
                const in_group at = {half, k % KT_SUPER_GROUP / KT_BLOCK};
                for (int v = 0; v < vectors; v++) {
                    const uint8_t *of_group = header[v / VECTORS];
                    const f32v scale = load_scale(of_group, v0 + v % VECTORS, at, &super[v], how);
                    f32v minimum;
                    if (how & MINIMA) minimum = load_minimum(of_group, v0 + v % VECTORS, at, &super[v], how);
                    for (int i = 0; i < rows; i++) {
                        f32v total = finish(sum[i][v], scale, of_x[i], load_f32(OUT(i, v)));
                        if (how & MINIMA)
                            total = scale_and_subtract(x_sum(x[i], a->k, k / KT_BLOCK, span_of(half, how)), minimum, total);
                        store_f32(OUT(i, v), total);
                    }
                }
            }
            w[0] += block_bytes(how), w[1] += block_bytes(how);
        }
    }
    for (int i = 0; !has_sums(how) && i < rows; i++)
        for (int v = 0; v < vectors; v++) store_f32(OUT(i, v), (f32v)sum[i][v]);
#undef OUT
#undef FETCH
}

/* The next step's rows when `left` are to go in equal steps of at most `most`: 7 are 4 + 3, not 6 + 1, since few chains
 * would wait for their own latency. */
INLINE size_t next_rows(size_t left, size_t most) {
    const size_t steps = (left + most - 1) / most;
    return (left + steps - 1) / steps;
}

#define PASS(rows, vectors)                                                   \
    case rows:                                                                \
        for (int v0 = 0; (rows) <= FEW_ROWS && v0 < VECTORS; v0 += (vectors)) \
            pass(a, ks, first, rows, panel, v0, vectors, how);                \
        break;

/* Rows are innermost, so that their later passes find a panel in L2. */
INLINE void few_of(const kt_dot *a, const range ks, const scaling how) {
    /* A panel's vectors alone are too few chains where decoding takes long; what is in place is read faster as one stream. */
    if (!IN_PLACE && VECTORS < 8 && a->m == 1 && a->panels == 2) {
        pass(a, ks, 0, 1, 0, 0, BOTH, how);
        return;
    }
    for (int panel = 0; panel < (int)a->panels; panel++)
        for (size_t first = 0, rows; first < a->m; first += rows) switch (rows = next_rows(a->m - first, FEW_ROWS)) {
                PASSES(PASS)
            }
}

INLINE void few(const kt_dot *a, const scaling how) {
    if (!EXPANDS) {
        few_of(a, (range){0, a->k}, how);
        return;
    }
    kt_dot of_record = *a;
    for (size_t k = 0; k < a->k; k += KT_SUPER_GROUP) {
        for (size_t p = 0; p < a->panels; p++) {
            uint8_t *to = (uint8_t *)a->scratch + p * EXPANDED_BYTES;
            expand(a->codebook, a->w[p], k / KT_BLOCK, RECORD_BLOCKS, to, how);
            of_record.w[p] = to;
        }
        few_of(&of_record, (range){k, k + KT_SUPER_GROUP}, how);
    }
}

/* DECODE_K k of a panel, decoded. */
typedef struct decoded_panel {
    uint32_t w[STRIPS][DECODE_K / STEP_K][STRIP];
    float scale[2 * BLOCKS][KT_PANEL]; /* one or two a block */
    float minimum[2 * BLOCKS][KT_PANEL];
} decoded_panel;

/* What few() or many() need. */
typedef union scratch {
    decoded_panel decoded;
    uint8_t expanded[2][EXPANDED_BYTES];
} scratch;

/* The bytes of a panel's first blocks as they are packed. */
INLINE size_t stored_bytes(const kt_dot *a, const size_t blocks, const size_t per, const scaling how) {
    return EXPANDS ? blocks * KT_PANEL * a->codebook->grid->record_bytes / RECORD_BLOCKS : packed_bytes(blocks, per, how);
}

/* Reads a panel's blocks from block `number` on. per: blocks behind each header; left: those before the next one. */
typedef struct block_reader {
    const uint8_t *w, *header;
    size_t number, count, left, per, header_bytes, super_bytes;
} block_reader;

/* Moves b->w past the super-scales and the header that stand before block i. Returns whether there was a header. */
INLINE int next_header(block_reader *b, const size_t i, const uint8_t **super) {
    if (b->super_bytes && (b->number + i) * KT_BLOCK % KT_SUPER_GROUP == 0) {
        *super = b->w;
        b->w += b->super_bytes;
    }
    if (b->left--) return 0;
    b->left = b->per - 1;
    b->header = b->w;
    b->w += b->header_bytes;
    return 1;
}

/* how: has the flags that decode() looks at, and a kind whose scales take as many bytes as the panel's. */
INLINE void decode_codes(const kt_codebook *book, block_reader b, decoded_panel *restrict to, const scaling how) {
    const table t = load_table(book, how);
    const uint8_t *super;
    for (size_t i = 0; i < b.count; i++, b.w += block_bytes(how)) {
        next_header(&b, i, &super);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            fold f;
            if (folds(how)) f = fold_of(fold_columns(b.header, v, how), how);
#pragma GCC unroll 32
            for (int j = 0; j < STEPS; j++) {
                const place at = {b.w, b.number + i, j / OCTET};
                const u32v wj = decode(&at, v, j % OCTET, how, &t, &f);
                memcpy(to->w[v / TILE_VECTORS][i * STEPS + j] + v % TILE_VECTORS * LANES, &wj, sizeof wj);
            }
        }
    }
}

/* Compiled once for all ways of scaling that decode alike: with what multiply() sees of them, too. */
#define DECODE(name, how)                                                                       \
    ONCE void decode_##name(const kt_codebook *book, const block_reader b, decoded_panel *to) { \
        decode_codes(book, b, to, how);                                                         \
    }
DECODE(plain, NONE)
#ifdef SEVERAL_SIZES
DECODE(plain_2, 2 * CODE)
DECODE(plain_2_minima, 2 * CODE | HALVES | MINIMA)
DECODE(plain_3, 3 * CODE | HALVES)
DECODE(plain_5, 5 * CODE)
DECODE(plain_5_minima, 5 * CODE | MINIMA)
DECODE(plain_6, 6 * CODE | HALVES)
DECODE(plain_8, 8 * CODE)
#endif
DECODE(zero_points, BF16 | ZERO_POINTS)
DECODE(folded, UE8M0 | FOLDED)

/* panel: all of it; number: of the first block. */
INLINE void decode_panel(const kt_dot *a, const uint8_t *restrict panel, size_t number, const size_t count,
                         decoded_panel *restrict to, const scaling how) {
    const size_t per = blocks_per_header(a->scale_group, how);
    uint8_t expanded[EXPANDED_BYTES] __attribute__((aligned(LINE)));
    if (EXPANDS) {
        expand(a->codebook, panel, number, count, expanded, how);
        panel = expanded, number %= RECORD_BLOCKS;
    }
    const block_reader first = {
        .w = panel + packed_bytes(number, per, how),
        .number = number,
        .count = count,
        .per = per,
        .header_bytes = header_bytes(how),
        .super_bytes = super_bytes(how),
    };
    const uint8_t *super = first.w;
    if (how & SUPER) super = panel + packed_bytes(number * KT_BLOCK / KT_SUPER_GROUP * (KT_SUPER_GROUP / KT_BLOCK), per, how);
    block_reader b = first;
    for (size_t i = 0, row = 0; has_sums(how) && i < count; i++, b.w += block_bytes(how))
        if (next_header(&b, i, &super)) {
            decode_header(b.header, super, number + i, to->scale + row, to->minimum + row, how);
            row += halves(how);
        }
    if (how & ZERO_POINTS) {
        decode_zero_points(a->codebook, first, to);
    } else if (how & FOLDED) {
        decode_folded(a->codebook, first, to);
    } else {
        switch (bits_of_code(how)) {
#ifdef SEVERAL_SIZES
            case 2: (how & MINIMA ? decode_plain_2_minima : decode_plain_2)(a->codebook, first, to); break;
            case 3: decode_plain_3(a->codebook, first, to); break;
            case 5: (how & MINIMA ? decode_plain_5_minima : decode_plain_5)(a->codebook, first, to); break;
            case 6: decode_plain_6(a->codebook, first, to); break;
            case 8: decode_plain_8(a->codebook, first, to); break;
#endif
            default: decode_plain(a->codebook, first, to);
        }
    }
}

/* A strip of a decoded panel: w [steps][STRIP]; scale and minimum [groups][KT_PANEL], from the strip's first column. per: blocks of a
 * scale group. begun: whether out holds sums or totals already. */
typedef struct strip {
    const uint32_t *w;
    const float *scale, *minimum;
    size_t k0, blocks, per;
    int begun;
} strip;

INLINE int hold_totals(const scaling how) { return HOLD_TOTALS || (HOLD_HALVES && how & (HALVES | MINIMA)); }
/* The vectors of a strip that a tile has. */
INLINE int tile_vectors(const scaling how) { return !HOLD_TOTALS && hold_totals(how) ? TILE_VECTORS / 2 : TILE_VECTORS; }

/* What a tile fetches while it multiplies: at each step the line so many bytes further. */
typedef struct stream {
    const uint8_t *at;
    size_t bytes;
} stream;

/* Whether a tile fetches. That takes two instructions a step and two registers, which the pointers of more rows need. */
INLINE int fetches(const size_t rows) { return rows <= (VECTOR_BYTES == 64 ? 8 : 5); }

/* rows x a strip's columns from vector v0 on, from row `first`; out from the strip's first column. Its sums are of per_sum pieces:
 * halves of blocks where those have scales of their own, else blocks. how: of shape_of(). */
INLINE void tile(const kt_dot *a, const strip *restrict s, const size_t first, float *restrict out, const int v0,
                 const int rows, const scaling how, stream codes) {
    const int vectors = tile_vectors(how), hold = hold_totals(how);
    const void *const *rows_x = a->x + first;
    const size_t k0 = s->k0, pieces = s->blocks * halves(how), piece = STEPS / halves(how); /* steps */
    out += first * KT_PANEL + v0 * LANES;
    const table t = load_table(a->codebook, how);
    const size_t per_sum = BLOCK_SUMS || how & (HALVES | MINIMA) ? 1 : s->per;
    const uint32_t *x[TILE_ROWS];
    sums sum[TILE_ROWS][TILE_VECTORS];
    f32v total[TILE_ROWS][TILE_VECTORS];
    for (int i = 0; i < rows; i++) {
        for (int v = 0; has_sums(how) && hold && v < vectors; v++)
            total[i][v] = s->begun ? load_f32(out + i * KT_PANEL + v * LANES) : splat(0);
        x[i] = (const uint32_t *)rows_x[i] + k0 / STEP_K;
        for (int v = 0; !has_sums(how) && v < vectors; v++)
            sum[i][v] = s->begun ? (sums)load_f32(out + i * KT_PANEL + v * LANES) : start(rows_x[i], a->k, 0, 0, &t, how);
    }
    const uint32_t *w = s->w + v0 * LANES;
    for (size_t p = 0, group = 0, in_group = 0; p < pieces;) {
        const size_t last = least(p + per_sum, pieces), block = k0 / KT_BLOCK + p / halves(how);
        const int span = span_of((int)(p % halves(how)), how);
        for (int i = 0; has_sums(how) && i < rows; i++)
            for (int v = 0; v < vectors; v++) sum[i][v] = start(rows_x[i], a->k, block, span, &t, how);
#pragma GCC unroll 2
        for (size_t step = p * piece; step < last * piece; step++, w += STRIP) {
            if (fetches((size_t)rows)) prefetch_l2(codes.at), codes.at += codes.bytes;
            u32v ws[TILE_VECTORS];
            for (int v = 0; v < vectors; v++) ws[v] = load_u32(w + v * LANES);
            /* GCC 12 would load them anew for each row, by way of the stack, with registers to spare. */
            for (int v = 0; hold && v < vectors; v++) __asm__("" : "+v"(ws[v]));
#pragma GCC unroll 12
            for (int i = 0; i < rows; i++) {
                const u32v xs = broadcast(x[i] + step);
                for (int v = 0; v < vectors; v++) sum[i][v] = dot(sum[i][v], ws[v], xs, how);
            }
        }
        if (has_sums(how)) {
            for (int v = 0; v < vectors; v++) {
                const f32v scale = load_f32(s->scale + group * KT_PANEL + (v0 + v) * LANES);
                f32v minimum;
                if (how & MINIMA) minimum = load_f32(s->minimum + group * KT_PANEL + (v0 + v) * LANES);
#pragma GCC unroll 12
                for (int i = 0; i < rows; i++) {
                    const f32v of_x = factor(rows_x[i], a->k, block, &t);
                    float *to = out + i * KT_PANEL + v * LANES;
                    f32v all = finish(sum[i][v], scale, of_x, hold ? total[i][v] : s->begun || p ? load_f32(to) : splat(0));
                    if (how & MINIMA) all = scale_and_subtract(x_sum(rows_x[i], a->k, block, span), minimum, all);
                    if (hold)
                        total[i][v] = all;
                    else
                        store_f32(to, all);
                }
            }
            if (!BLOCK_SUMS || how & (HALVES | MINIMA) || ++in_group == s->per) group++, in_group = 0;
        }
        p = last;
    }
    for (int i = 0; (!has_sums(how) || hold) && i < rows; i++)
        for (int v = 0; v < vectors; v++)
            store_f32(out + i * KT_PANEL + v * LANES, has_sums(how) ? total[i][v] : (f32v)sum[i][v]);
}

/* A tile's share of the next codes: up to a line at each of its steps, since as many at once would wait for one another (bfloat16
 * weights and 16 rows took 1.4 times as long). What is more is fetched at once. */
INLINE stream fetch_share(const uint8_t *from, const size_t share, const size_t rows, const size_t steps) {
    const size_t spread = fetches(rows) ? least(share, steps * LINE) : 0, at_once = share - spread;
    for (size_t at = 0; at < at_once; at += LINE) prefetch_l2(from + at);
    return (stream){from + at_once, spread ? (spread + steps - 1) / steps : 0};
}

/* What comes to L2 while a panel's DECODE_K k are multiplied: packed codes, `each` bytes of them with a tile; and of x. */
typedef struct ahead {
    const uint8_t *codes;
    size_t each, left;
    size_t x_bytes; /* of a row, DECODE_K k further */
} ahead;

#define TILE(rows)                                                                          \
    case rows:                                                                              \
        for (int v0 = 0; (rows) <= TILE_ROWS && v0 < TILE_VECTORS; v0 += tile_vectors(how)) \
            tile(a, s, first, out, v0, rows, how, codes);                                   \
        break

/* All rows x a strip. */
INLINE void multiply(const kt_dot *a, const strip *restrict s, ahead *restrict next, float *restrict out, const scaling how) {
    for (size_t first = 0, rows; first < a->m; first += rows) {
        rows = next_rows(a->m - first, TILE_ROWS);
        const size_t share = least(next->each, next->left);
        const stream codes = fetch_share(next->codes, share, rows, s->blocks * STEPS);
        next->codes += share, next->left -= share;
        for (size_t i = first; next->x_bytes && i < first + rows; i++)
            for (size_t at = 0; at < next->x_bytes; at += LINE)
                prefetch_l2((const uint8_t *)a->x[i] + (s->k0 + DECODE_K) * 4 / STEP_K + at);
        switch (rows) {
            TILE(1);
            TILE(2);
            TILE(3);
            TILE(4);
            TILE(5);
            TILE(6);
            TILE(7);
            TILE(8);
            TILE(9);
            TILE(10);
            TILE(11);
            TILE(12);
        }
    }
}

/* The shape of a way of scaling once weights are decoded, one of five: no scale groups; or groups, of blocks or of halves of blocks,
 * with or without minima. */
INLINE scaling shape_of(const scaling how) { return has_sums(how) ? BF16 | (how & (HALVES | MINIMA)) : NONE; }

/* Compiled once for all ways of one shape. */
#define MULTIPLY(name, how) \
    ONCE void multiply_##name(const kt_dot *a, const strip *s, ahead *next, float *out) { multiply(a, s, next, out, how); }
MULTIPLY(chains, NONE)
MULTIPLY(groups, BF16)
MULTIPLY(halves, BF16 | HALVES)
MULTIPLY(minima, BF16 | MINIMA)
MULTIPLY(halves_minima, BF16 | HALVES | MINIMA)

INLINE void multiply_strip(const kt_dot *a, const strip *s, ahead *next, float *out, const scaling how) {
    switch (shape_of(how)) {
        case NONE: multiply_chains(a, s, next, out); break;
        case BF16: multiply_groups(a, s, next, out); break;
        case BF16 | HALVES: multiply_halves(a, s, next, out); break;
        case BF16 | MINIMA: multiply_minima(a, s, next, out); break;
        default: multiply_halves_minima(a, s, next, out);
    }
}

/* Panels are innermost, so that the second finds the rows' x in L2. While DECODE_K k are multiplied, the codes and x of the next ones
 * come to L2, some with each tile: the rows are too short there for the hardware to foresee. */
INLINE void many(const kt_dot *a, const scaling how) {
    decoded_panel *decoded = a->scratch;
    const size_t per = blocks_per_header(a->scale_group, how), tiles = (a->m + TILE_ROWS - 1) / TILE_ROWS * STRIPS;
    for (size_t k0 = 0; k0 < a->k; k0 += DECODE_K) {
        const size_t blocks = least(DECODE_K, a->k - k0) / KT_BLOCK, left = a->k - k0 - blocks * KT_BLOCK;
        for (size_t p = 0; p < a->panels; p++) {
            if (!IN_PLACE) decode_panel(a, a->w[p], k0 / KT_BLOCK, blocks, decoded, how);
            const int last_panel = p + 1 == a->panels;
            const size_t next_k = last_panel ? least(DECODE_K, left) : 0;
            const size_t next_block = !last_panel ? k0 / KT_BLOCK : left ? k0 / KT_BLOCK + blocks : 0;
            const uint8_t *next_panel = !last_panel ? a->w[p + 1] : left ? a->w[0] : a->next[0];
            const size_t next_at = stored_bytes(a, next_block, per, how);
            const uint8_t *next = next_panel ? next_panel + next_at : a->w[p];
            const size_t next_end = least(next_block + BLOCKS, a->k / KT_BLOCK);
            const size_t next_bytes = next_panel ? stored_bytes(a, next_end, per, how) - next_at : 0;
            ahead coming = {.codes = next, .each = (next_bytes / tiles + LINE) / LINE * LINE, .left = next_bytes};
            for (int n = 0; n < STRIPS; n++) {
                const strip s = {
                    .w = IN_PLACE ? (const uint32_t *)(a->w[p] + packed_bytes(k0 / KT_BLOCK, per, how)) : decoded->w[n][0],
                    .scale = decoded->scale[0] + n * STRIP,
                    .minimum = decoded->minimum[0] + n * STRIP,
                    .k0 = k0,
                    .blocks = blocks,
                    .per = per,
                    .begun = k0 || adds(a, how),
                };
                coming.x_bytes = n ? 0 : next_k * 4 / STEP_K;
                multiply_strip(a, &s, &coming, a->out[p] + n * STRIP, how);
            }
        }
    }
}

#ifdef KT_FLOAT_SUMS_H
#include "kernels/loops/transposed.h"
#else /* rows of integers are not for training */
#define TRANSPOSED(name, how, as)
#define TRANSPOSED_BY(name)
#endif

/* Whether decode_panel() has a function for a way. */
#ifdef SEVERAL_SIZES
#define AS_DECODED(how) ((how) / CODE * CODE | ((how) & (HALVES | MINIMA)))
#define IS_DECODED(how)                                                                                                 \
    (AS_DECODED(how) == 2 * CODE || AS_DECODED(how) == (2 * CODE | HALVES | MINIMA) ||                                  \
     AS_DECODED(how) == (3 * CODE | HALVES) || AS_DECODED(how) == 5 * CODE || AS_DECODED(how) == (5 * CODE | MINIMA) || \
     AS_DECODED(how) == (6 * CODE | HALVES) || AS_DECODED(how) == 8 * CODE)
#else
#define IS_DECODED(how) 1
#endif

/* few(), many() and transpose() for one way of scaling. With FEW_MAX 0, few() is never used. Where KT_LOOPS is another row than KT_ISA,
 * its object has few() and many(). */
#define FUNCTIONS(name, how)                                                                                 \
    _Static_assert(IS_DECODED(how), "decode_panel() has no function for this size and these scales");        \
    _Static_assert(!((how) & FOLDED) || (how) == (UE8M0 | FOLDED), "decode_folded() is of these");           \
    _Static_assert(!((how) & ZERO_POINTS) || (how) == (BF16 | ZERO_POINTS) || (how) == (FP16 | ZERO_POINTS), \
                   "decode_zero_points() is of these");                                                      \
    LOOPS(name, how) TRANSPOSED(name, how, OPERAND_OF(how))
#define LOOP_(what, source, name, isa) kt_##source##_##name##_##what##_##isa
#define LOOP__(what, source, name, isa) LOOP_(what, source, name, isa)
#define LOOP(what, name) LOOP__(what, KT_SOURCE, name, KT_LOOPS)
#ifdef KT_LOOPS
#define LOOPS(name, how) void LOOP(few, name)(const kt_dot *a), LOOP(many, name)(const kt_dot *a);
#else
#define KT_LOOPS KT_ISA
#define LOOPS(name, how)                                     \
    void LOOP(many, name)(const kt_dot *a) { many(a, how); } \
    void LOOP(few, name)(const kt_dot *a) { FEW_MAX ? few(a, how) : LOOP(many, name)(a); }
#endif

/* What a kernel's row says of these, and of the scale groups that it takes. */
#define SERVED_BY(name) \
    .few_max = FEW_MAX, .scratch_bytes = sizeof(scratch), .few = LOOP(few, name), .many = LOOP(many, name) TRANSPOSED_BY(name)
#define PER_16 .scale_group_min = KT_SCALE_GROUP_MIN, .scale_group_max = KT_SCALE_GROUP_MIN
#define PER_BLOCK .scale_group_min = KT_BLOCK, .scale_group_max = KT_BLOCK
#define PER_SUPER_GROUP .scale_group_min = KT_SUPER_GROUP, .scale_group_max = KT_SUPER_GROUP
#define PER_BLOCKS .scale_group_min = KT_BLOCK, .scale_group_max = KT_SCALE_GROUP_MAX
