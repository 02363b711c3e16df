/* 64 columns n and 64 k of a packed panel, transposed and decoded: an operand of the transposed product (kt_transposing).
 *
 * DEFINITION  a weight is fp32(code) * scale - minimum: the product rounded to fp32, where it has more than 24 bits, then the difference
 *                 AS_PAIRS    bf16 numbers as decode() gives them, of folded weights or of those without scales
 *                 AS_FLOATS   fp32
 *                 AS_ROUNDED  rounded to bf16, RNE
 *                 AS_SPLIT    that, and what it lacks: two bf16 numbers, whose sum is a weight of up to 16 bits
 * LAYOUT      the codes are transposed as they are packed, to blocks of the same layout, whose 64 columns are k and whose 32 inputs are
 *             n: so decode() gives weights in the operand's order, and what a column n has is broadcast. A code's place has the
 *             bits of its column c and of its k; some bits of k say which code of a dword it is, the others in which row of
 *             dwords it stands. Bit b of c and bit b of k change places, one b after the other. Where k's
 *                 is of the row                  lanes of two rows do
 *                 says which half of a dword     words of a qword do; it is always bit 0
 *                 says which code of a half      codes of two rows do, after c's bit has gone there, and before it comes back
 * REGULARITIES 2^UNIT_BITS columns and as many k are in registers. Packed codes have a quarter or an eighth of the bytes of
 *             decoded ones, and scales need not be transposed.
 *
 * An includer has what panel.h's kernel files have for decode(): STEP_K, table, load_table(), fold, fold_columns(), fold_of(), decode().
 * A family's layout header says: CODE_BITS; code_bit(b), which bit of a code's number in its dword is bit b of k, or -1; ROW_BYTES,
 * from a row of dwords to the next; SIXTEEN_BYTES, from 16 columns to the next. AS_PACKED 1: codes are the operand's weights as they
 * are. It may define OPERAND_OF(how) itself. With AS_ROUNDED and AS_SPLIT, decode() gives codes without their scales.
 */
#include "kernels/common/exchange.h"
#include "kernels/common/expands.h"
#include "kernels/common/headers.h"
#include "kernels/common/place.h"

enum operand { AS_PAIRS, AS_FLOATS, AS_ROUNDED, AS_SPLIT };

enum {
    LANE_BITS = __builtin_ctz(LANES),
    DWORD_BITS = __builtin_ctz(32 / CODE_BITS),                          /* of k, that say which code of a dword */
    UNIT_BITS = DWORD_BITS + 1 > LANE_BITS ? DWORD_BITS + 1 : LANE_BITS, /* those, and one of the row */
    UNIT = 1 << UNIT_BITS,
    UNIT_ROWS = UNIT >> DWORD_BITS,
    UNIT_VECTORS = UNIT / LANES,      /* of a row */
    SIDE = KT_PANEL / KT_BLOCK,       /* blocks of 64 k */
    BLOCK_VECTORS = KT_BLOCK / LANES, /* of 32 columns of the operand */
    OPERAND_ROW_BYTES = KT_PANEL * 4, /* an input, or a pair of them */
    SUPER_BLOCKS = KT_SUPER_GROUP / KT_BLOCK,
};

/* The bit of a row's number that bit b of k is. */
INLINE int row_bit(const int b) {
    int row = b;
    for (int lower = 0; lower < b; lower++) row -= code_bit(lower) >= 0;
    return row;
}

typedef u32v unit[UNIT_VECTORS * UNIT_ROWS]; /* [column / LANES][row] */

/* Exchanges bit b of a lane's number with a bit of the vector's. */
INLINE void exchange_with_lanes(unit x, const int bit, const int b) {
#pragma GCC unroll 16
    for (int i = 0; i < UNIT_VECTORS * UNIT_ROWS; i++)
        if (!(i & bit)) exchange_lanes(&x[i], &x[i + bit], b);
}

/* Exchanges the vector's bit 0 with bit b of the lane's; before that with bit `before`, if it is not negative: both in one step. */
INLINE void exchange_rows(unit x, const int before, const int b) {
#pragma GCC unroll 16
    for (int i = 0; before >= 0 && i < UNIT_VECTORS * UNIT_ROWS; i += 2) exchange_lanes_twice(&x[i], &x[i + 1], before, b);
    if (before < 0) exchange_with_lanes(x, 1, b);
}

/* Exchanges a bit of a code's number in its half of a dword, which is `bits` bits wide, with one of the vector's. */
INLINE void exchange_with_codes(unit x, const int bit, const int bits) {
#pragma GCC unroll 16
    for (int i = 0; i < UNIT_VECTORS * UNIT_ROWS; i++)
        if (!(i & bit)) exchange_pieces(&x[i], &x[i + bit], bits);
}

INLINE void transpose_unit(unit x) {
    int due = -1; /* the lane's bit that has to come back from the row's, which the next step may do as well */
#pragma GCC unroll 4
    for (int b = 0; b < UNIT_BITS; b++) {
        const int in_dword = code_bit(b) >= 0, in_lane = b < LANE_BITS, row = in_dword ? 1 : 1 << row_bit(b);
        const int column = in_lane ? 0 : UNIT_ROWS << (b - LANE_BITS), bits = in_dword ? CODE_BITS << code_bit(b) : 0;
        if (in_dword && b == 0) {
#pragma GCC unroll 16
            for (int i = 0; i < UNIT_VECTORS * UNIT_ROWS; i++) x[i] = exchange_middle(x[i]);
        } else if (in_dword && in_lane) {
            exchange_rows(x, due, b);
            exchange_with_codes(x, 1, bits);
            due = b;
        } else if (in_dword) {
            exchange_with_codes(x, column, bits);
        } else if (in_lane && row == 1) {
            exchange_rows(x, due, b);
            due = -1;
        } else if (in_lane) {
            exchange_with_lanes(x, row, b);
        } else {
            if (due >= 0) exchange_with_lanes(x, 1, due);
            due = -1;
#pragma GCC unroll 16
            for (int i = 0; i < UNIT_VECTORS * UNIT_ROWS; i++)
                if (i & row && !(i & column)) {
                    const u32v moved = x[i];
                    x[i] = x[i ^ row ^ column], x[i ^ row ^ column] = moved;
                }
        }
    }
    if (due >= 0) exchange_with_lanes(x, 1, due);
}

/* The dwords of UNIT columns and k, from column and k on, in a block. */
INLINE size_t unit_at(const size_t column, const size_t k) {
    return (k % KT_BLOCK >> DWORD_BITS) * ROW_BYTES + column / 16 * SIXTEEN_BYTES + column % 16 * 4;
}

/* Transposes the codes of SIDE blocks, or of the first of them; to: SIDE blocks, side by side. */
ONCE void transpose_codes(const uint8_t *const from[SIDE], const size_t blocks, uint8_t *restrict to) {
    for (size_t k = 0; k < blocks * KT_BLOCK; k += UNIT)
        for (size_t column = 0; column < KT_PANEL; column += UNIT) {
            const uint8_t *source = from[k / KT_BLOCK] + unit_at(column, k);
            uint8_t *target = to + column / KT_BLOCK * BLOCK_BYTES + unit_at(k, column);
            unit x;
#pragma GCC unroll 16
            for (int i = 0; i < UNIT_VECTORS * UNIT_ROWS; i++)
                x[i] = load_u32(source + i % UNIT_ROWS * ROW_BYTES + i / UNIT_ROWS * LANES * 4);
            transpose_unit(x);
#pragma GCC unroll 16
            for (int i = 0; i < UNIT_VECTORS * UNIT_ROWS; i++)
                memcpy(target + i % UNIT_ROWS * ROW_BYTES + i / UNIT_ROWS * LANES * 4, &x[i], sizeof x[i]);
        }
}

/* What a block has for each of its columns. */
typedef struct of_columns {
    float scale[2][KT_PANEL], minimum[2][KT_PANEL]; /* of its halves, or of all in the first */
    uint32_t fold[KT_PANEL + 1];
} __attribute__((aligned(LINE))) of_columns;

INLINE void load_columns(const uint8_t *header, const uint8_t *super, const size_t number, of_columns *restrict to,
                         const scaling how) {
    if (in_groups(how)) decode_header(header, super, number, to->scale, to->minimum, how);
    for (int v = 0; folds(how) && v < VECTORS; v++) {
        const u32v columns = fold_columns(header, v, how);
        memcpy(to->fold + v * LANES, &columns, sizeof columns);
    }
}

/* What decode() takes for the inputs of a step: n, or n below n + 1. Both words of a column are equal where these are a pair. */
INLINE fold fold_of_inputs(const of_columns *c, const int n, const scaling how) {
    return fold_of(broadcast((const uint8_t *)(c->fold + n) + (STEP_K == 2 ? 2 : 0)), how);
}

/* A code of input n as a weight, in fp32. */
INLINE f32v scaled(const f32v code, const of_columns *c, const int n, const int half, const scaling how) {
    if (!in_groups(how)) return code;
    const f32v product = code * splat(c->scale[half][n]);
    return how & MINIMA ? product - splat(c->minimum[half][n]) : product;
}

#ifdef __AVX512BF16__
/* Numbers of two inputs, rounded, in the words of each column; and what that lacks of them. */
INLINE u32v bf16_pair(const f32v first, const f32v second) {
    const u32v words = {0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
                        0x180008, 0x190009, 0x1A000A, 0x1B000B, 0x1C000C, 0x1D000D, 0x1E000E, 0x1F000F};
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first); /* 16 of each */
    return (u32v)_mm512_permutexvar_epi16((__m512i)words, both);
}
INLINE u32v rest_of_pair(const f32v first, const f32v second, const u32v rounded) {
    return bf16_pair(first - (f32v)(rounded << 16), second - (f32v)(rounded & 0xFFFF0000));
}
#else
INLINE u32v bf16_pair(const f32v first, const f32v second) { return (void)second, (u32v)first; }
INLINE u32v rest_of_pair(const f32v first, const f32v second, const u32v rounded) { return (void)first, (void)second, rounded; }
#endif

INLINE void store_u32(void *p, const u32v v) { memcpy(p, &v, sizeof v); }

/* Inputs n and n + 1 of a vector of columns; w: decode()'s, of one or two steps. to: the vector's columns of the operand's terms. */
INLINE void store_inputs(const u32v w[2], const of_columns *c, const int n, const int half, uint8_t *const to[2],
                         const scaling how, const enum operand as) {
    if (as == AS_PAIRS) {
        store_u32(to[0] + n / 2 * OPERAND_ROW_BYTES, w[0]);
        return;
    }
    const f32v first = scaled((f32v)(STEP_K == 2 ? w[0] << 16 : w[0]), c, n, half, how);
    const f32v second = scaled((f32v)(STEP_K == 2 ? w[0] & 0xFFFF0000 : w[1]), c, n + 1, half, how);
    if (as == AS_FLOATS) {
        store_f32(to[0] + n * OPERAND_ROW_BYTES, first);
        store_f32(to[0] + (n + 1) * OPERAND_ROW_BYTES, second);
        return;
    }
    const u32v rounded = bf16_pair(first, second);
    store_u32(to[0] + n / 2 * OPERAND_ROW_BYTES, rounded);
    if (as == AS_SPLIT) store_u32(to[1] + n / 2 * OPERAND_ROW_BYTES, rest_of_pair(first, second, rounded));
}

/* What became of a block of 32 k: 32 columns of the operand, from `first` on. codes: transposed. */
INLINE void decode_columns(const uint8_t *codes, const of_columns *c, const size_t first, const table *t, uint8_t *restrict to0,
                           uint8_t *restrict to1, const scaling how, const enum operand as) {
#pragma GCC unroll 1
    for (int n = 0; n < KT_PANEL; n += 8) {
        const place p = {codes + n / KT_BLOCK * BLOCK_BYTES, 0, n % KT_BLOCK / 8};
#pragma GCC unroll 4
        for (int pair = 0; pair < 8; pair += 2) {
            fold f[2];
            for (int i = 0; folds(how) && i < 2; i += STEP_K) f[i] = fold_of_inputs(c, n + pair + i, how);
#pragma GCC unroll 8
            for (int v = 0; v < BLOCK_VECTORS; v++) {
                const size_t column = first + v * LANES;
                uint8_t *const at[2] = {to0 + column * 4, as == AS_SPLIT ? to1 + column * 4 : NULL};
                u32v w[2];
                for (int i = 0; i < 2; i += STEP_K) w[i] = decode(&p, column / LANES, (pair + i) / STEP_K, how, t, &f[i]);
                store_inputs(w, c, n + pair, v * LANES / 16 % halves(how), at, how, as);
            }
        }
    }
}

INLINE int in_pairs(const enum operand as) { return AS_PACKED ? CODE_BITS == 16 : as != AS_FLOATS; }

INLINE void transpose(const kt_transposing *a, const scaling how, const enum operand as) {
    const size_t per = blocks_per_header(a->scale_group, how), blocks = least(SIDE, (a->k - a->first) / KT_BLOCK);
    size_t number = a->first / KT_BLOCK;
    const uint8_t *packed = a->w, *codes[SIDE] = {0}, *header[SIDE], *super[SIDE];
    uint8_t expanded[EXPANDED_BYTES] __attribute__((aligned(LINE)));
    if (EXPANDS) {
        expand(a->codebook, a->w, number, blocks, expanded, how);
        packed = expanded, number %= RECORD_BLOCKS;
    }
#ifdef SEVERAL_SIZES
    uint8_t widened[SIDE][BLOCK_BYTES] __attribute__((aligned(LINE)));
    const scaling now = how % CODE | CODE_BITS * CODE; /* how codes stand once they are transposed */
#else
    const scaling now = how;
#endif
    for (size_t b = 0; b < blocks; b++) {
        const size_t of_super = (number + b) / SUPER_BLOCKS * SUPER_BLOCKS, of_header = (number + b) / per * per;
        super[b] = packed + packed_bytes(of_super, per, how);
        header[b] = packed + packed_bytes(of_header, per, how) + (of_header == of_super ? super_bytes(how) : 0);
        codes[b] = header[b] + header_bytes(how) + (number + b - of_header) * block_bytes(how);
#ifdef SEVERAL_SIZES
        if (bits_of_code(how) < CODE_BITS) codes[b] = widen_block(codes[b], widened[b], how);
#endif
    }
    uint8_t transposed[AS_PACKED ? 1 : SIDE * BLOCK_BYTES] __attribute__((aligned(LINE)));
    transpose_codes(codes, blocks, AS_PACKED ? a->to[0] : transposed);
    const table t = load_table(a->codebook, how);
    for (size_t b = 0; !AS_PACKED && b < blocks; b++) {
        of_columns c;
        load_columns(header[b], super[b], number + b, &c, how);
        decode_columns(transposed, &c, b * KT_BLOCK, &t, a->to[0], a->to[1], now, as);
    }
    for (int term = 0; blocks < SIDE && term < (as == AS_SPLIT ? 2 : 1); term++)
        for (size_t n = 0; n < KT_PANEL; n += in_pairs(as) ? 2 : 1) {
            uint8_t *row = (uint8_t *)a->to[term] + n / (in_pairs(as) ? 2 : 1) * OPERAND_ROW_BYTES;
            memset(row + blocks * KT_BLOCK * 4, 0, (SIDE - blocks) * KT_BLOCK * 4);
        }
}

/* What decode() gives, or its product with the scale. */
#ifndef OPERAND_OF
#define OPERAND_OF(how) (STEP_K == 2 && (((how) & KINDS) == NONE || (how) & FOLDED) ? AS_PAIRS : AS_FLOATS)
#endif

/* transpose_<name>() for one way of scaling, and what a kernel's row says of it. */
#define TRANSPOSED(name, how, as)                                                                                     \
    enum { pairs_##name = AS_PACKED ? CODE_BITS == 16 : (as) != AS_FLOATS, terms_##name = (as) == AS_SPLIT ? 2 : 1 }; \
    static void transpose_##name(const kt_transposing *a) { transpose(a, (as) < AS_ROUNDED ? (how) : (how) & ~FOLDED, as); }
#define TRANSPOSED_BY(name) , .operand = pairs_##name ? "b16" : "f32", .terms = terms_##name, .transpose = transpose_##name
