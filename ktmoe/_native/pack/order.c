/* Source orders: codes as a checkpoint has them to rows along k, low nibble first, and back.
 *
 * SHAPES      4-bit codes, dwords of eight: along k [n][k/8] or, transposed, [k/8][n]; along n [k][n/8]
 *             codes of 8, 16 and 32 bits: [k][n]
 *             records: records.c
 * DEFINITION  nibble i of a dword, from the lowest bits up, is code nibbles[i] of its eight
 */
#include "pack/order.h"

#include <string.h>

#include "ktmoe.h"
#include "pack/transpose.h"

enum { EIGHT = 8, LINE_BYTES = 64, TILE_BYTES = 16, SQUARES_AHEAD = 4 };

/* Code c of eight is nibble at[c]. */
static void invert(const uint8_t nibbles[EIGHT], uint8_t at[EIGHT]) {
    for (uint8_t i = 0; i < EIGHT; i++) at[nibbles[i]] = i;
}

/* Nibble i becomes what was nibble from[i]. */
static inline uint32_t permute(uint32_t dword, const uint8_t from[EIGHT]) {
    uint32_t to = 0;
    for (int i = 0; i < EIGHT; i++) to |= (dword >> 4 * from[i] & 15) << 4 * i;
    return to;
}

static uint32_t load(const uint8_t *p) {
    uint32_t dword;
    memcpy(&dword, p, sizeof dword);
    return dword;
}

static void store(uint8_t *p, uint32_t dword) { memcpy(p, &dword, sizeof dword); }

/* Dwords along k: from[i] as permute() has it. A dword of row i and dword j of a matrix of dwords is at i * i_bytes + j * j_bytes. */
typedef struct dwords {
    const uint8_t *from;
    size_t from_i, from_j;
    uint8_t *to;
    size_t to_i, to_j;
} dwords;

static void move_dwords(dwords d, size_t rows, size_t count, const uint8_t nibbles[EIGHT]) {
    static const uint8_t same[EIGHT] = {0, 1, 2, 3, 4, 5, 6, 7};
    if (memcmp(nibbles, same, EIGHT)) {
        for (size_t i = 0; i < rows; i++)
            for (size_t j = 0; j < count; j++)
                store(d.to + i * d.to_i + j * d.to_j, permute(load(d.from + i * d.from_i + j * d.from_j), nibbles));
        return;
    }
    /* Four by four where one side has rows as neighbours and the other has k. */
    const bool columns_to_rows = d.from_i == 4 && d.to_j == 4, rows_to_columns = d.from_j == 4 && d.to_i == 4;
    for (size_t i = 0; i < rows; i += 4)
        for (size_t j = 0; j < count; j += 4) {
            if (i + 4 <= rows && j + 4 <= count && (columns_to_rows || rows_to_columns)) {
                const size_t outer = columns_to_rows ? d.from_j : d.from_i;
                u32x4 v[4];
                for (size_t l = 0; l < 4; l++) memcpy(&v[l], d.from + i * d.from_i + j * d.from_j + l * outer, sizeof v[l]);
                store_transposed(v, d.to + i * d.to_i + j * d.to_j, columns_to_rows ? d.to_i : d.to_j);
                continue;
            }
            for (size_t a = i; a < i + 4 && a < rows; a++)
                for (size_t b = j; b < j + 4 && b < count; b++)
                    store(d.to + a * d.to_i + b * d.to_j, load(d.from + a * d.from_i + b * d.from_j));
        }
}

/* Eight dwords of eight nibbles: out[c] has nibble at[c] of in[i] as its nibble i. Four such squares together. */
static inline void transpose_nibbles(const u32x4 in[EIGHT], const uint8_t at[EIGHT], u32x4 out[EIGHT]) {
    for (int c = 0; c < EIGHT; c++) {
        u32x4 dword = {0};
        for (int i = 0; i < EIGHT; i++) dword |= (in[i] >> 4 * at[c] & 15) << 4 * i;
        out[c] = dword;
    }
}

/* a0 b0 a1 b1 and so on, of the first halves of a and b, or of the second. */
#define FIRST_BYTES(a, b) SHUFFLE(u8x16, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define SECOND_BYTES(a, b) SHUFFLE(u8x16, a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)

/* Transposes a square of 16 x 16 bytes: four rows become dwords, which are transposed. */
static inline void transpose_bytes(const uint8_t *from, size_t from_row, uint8_t *to, size_t to_row) {
    u32x4 v[4][4]; /* of four columns, of four rows */
    for (size_t four = 0; four < 4; four++) {
        u8x16 r[4];
        for (size_t i = 0; i < 4; i++) memcpy(&r[i], from + (4 * four + i) * from_row, sizeof r[i]);
        const u16x8 first01 = (u16x8)FIRST_BYTES(r[0], r[1]), first23 = (u16x8)FIRST_BYTES(r[2], r[3]);
        const u16x8 second01 = (u16x8)SECOND_BYTES(r[0], r[1]), second23 = (u16x8)SECOND_BYTES(r[2], r[3]);
        v[0][four] = (u32x4)FIRST_WORDS(first01, first23), v[1][four] = (u32x4)SECOND_WORDS(first01, first23);
        v[2][four] = (u32x4)FIRST_WORDS(second01, second23), v[3][four] = (u32x4)SECOND_WORDS(second01, second23);
    }
    for (size_t four = 0; four < 4; four++) store_transposed(v[four], to + 4 * four * to_row, to_row);
}

/* Transposes a square of 8 x 8 words: two rows become dwords, which are transposed. */
static inline void transpose_words(const uint8_t *from, size_t from_row, uint8_t *to, size_t to_row) {
    u32x4 first[4], second[4];
    for (size_t two = 0; two < 4; two++) {
        u16x8 r[2];
        for (size_t i = 0; i < 2; i++) memcpy(&r[i], from + (2 * two + i) * from_row, sizeof r[i]);
        first[two] = (u32x4)FIRST_WORDS(r[0], r[1]), second[two] = (u32x4)SECOND_WORDS(r[0], r[1]);
    }
    store_transposed(first, to, to_row);
    store_transposed(second, to + 4 * to_row, to_row);
}

/* Transposes a square of 4 x 4 dwords. */
static inline void transpose_dwords(const uint8_t *from, size_t from_row, uint8_t *to, size_t to_row) {
    u32x4 v[4];
    for (size_t i = 0; i < 4; i++) memcpy(&v[i], from + i * from_row, sizeof v[i]);
    store_transposed(v, to, to_row);
}

/* A matrix of codes of so many bytes, transposed: its own inverse. As many rows together as fill a cache line of what is written.
 * One side is a checkpoint's, whose rows are far apart, and a panel has few columns of each. The hardware does not foresee these:
 * they are fetched ahead, at up to 1.7 times the speed. */
void kt_transpose(const uint8_t *from, size_t from_row, size_t rows, size_t columns, uint8_t *to, size_t to_row, size_t bytes) {
    const size_t side = TILE_BYTES / bytes, line = LINE_BYTES / bytes;
    for (size_t first = 0; first < rows; first += line)
        for (size_t j = 0; j < columns; j += side) {
            if (columns <= KT_PANEL) { /* the checkpoint's are read: this square's share of the next rows */
                for (size_t i = j * line / KT_PANEL; i < (j + side) * line / KT_PANEL && first + line + i < rows; i++)
                    for (size_t at = 0; at < columns * bytes; at += LINE_BYTES)
                        __builtin_prefetch(from + (first + line + i) * from_row + at);
            } else {
                const size_t next = j + SQUARES_AHEAD * side;
                for (size_t b = next; b < next + side && b < columns; b++)
                    __builtin_prefetch(to + b * to_row + first * bytes, 1);
            }
            for (size_t i = first; i < first + line && i < rows; i += side) {
                const uint8_t *square = from + i * from_row + j * bytes;
                uint8_t *turned = to + j * to_row + i * bytes;
                if (i + side <= rows && j + side <= columns) {
                    (bytes == 1   ? transpose_bytes
                     : bytes == 2 ? transpose_words
                                  : transpose_dwords)(square, from_row, turned, to_row);
                    continue;
                }
                for (size_t a = 0; a < side && i + a < rows; a++)
                    for (size_t b = 0; b < side && j + b < columns; b++)
                        memcpy(turned + b * to_row + a * bytes, square + a * from_row + b * bytes, bytes);
            }
        }
}

/* Where the first record of a rectangle's row is, in bytes. */
static size_t record_at(const kt_records *o, kt_rectangle r, size_t row) {
    return ((r.row + row) * r.k + r.column) / o->weights * o->bytes;
}

void kt_order_to_rows(const kt_order *o, const uint8_t *stored, kt_rectangle r, uint8_t *rows, size_t row_bytes) {
    if (o->records.bytes) {
        for (size_t i = 0; i < r.rows; i++)
            kt_records_to_rows(&o->records, stored + record_at(&o->records, r, i), r.columns / o->records.weights,
                               rows + i * row_bytes);
        return;
    }
    if (o->code_bytes) {
        const size_t b = o->code_bytes;
        kt_transpose(stored + (r.column * r.n + r.row) * b, r.n * b, r.columns, r.rows, rows, row_bytes, b);
        return;
    }
    uint8_t at[EIGHT];
    invert(o->nibbles, at);
    if (!o->along_n) {
        const size_t i = o->transposed ? 4 : r.k / 2, j = o->transposed ? r.n * 4 : 4;
        const dwords d = {stored + r.row * i + r.column / EIGHT * j, i, j, rows, row_bytes, 4};
        move_dwords(d, r.rows, r.columns / EIGHT, at);
        return;
    }
    for (size_t k = 0; k < r.columns; k += EIGHT)
        for (size_t n = 0; n < r.rows; n += 4 * EIGHT) {
            const size_t squares = r.rows - n < 4 * EIGHT ? (r.rows - n) / EIGHT : 4;
            u32x4 in[EIGHT] = {0}, out[EIGHT];
            for (size_t i = 0; i < EIGHT; i++)
                memcpy(&in[i], stored + (r.column + k + i) * r.n / 2 + (r.row + n) / 2, squares * 4);
            transpose_nibbles(in, at, out);
            for (size_t s = 0; s < squares; s++)
                for (size_t c = 0; c < EIGHT; c++) store(rows + (n + s * EIGHT + c) * row_bytes + k / 2, out[c][s]);
        }
}

void kt_order_from_rows(const kt_order *o, const uint8_t *rows, size_t row_bytes, kt_rectangle r, uint8_t *stored) {
    if (o->records.bytes) {
        for (size_t i = 0; i < r.rows; i++)
            kt_records_from_rows(&o->records, rows + i * row_bytes, r.columns / o->records.weights,
                                 stored + record_at(&o->records, r, i));
        return;
    }
    if (o->code_bytes) {
        const size_t b = o->code_bytes;
        kt_transpose(rows, row_bytes, r.rows, r.columns, stored + (r.column * r.n + r.row) * b, r.n * b, b);
        return;
    }
    if (!o->along_n) {
        const size_t i = o->transposed ? 4 : r.k / 2, j = o->transposed ? r.n * 4 : 4;
        const dwords d = {rows, row_bytes, 4, stored + r.row * i + r.column / EIGHT * j, i, j};
        move_dwords(d, r.rows, r.columns / EIGHT, o->nibbles);
        return;
    }
    /* Code c of a dword is row c; to nibble i goes row nibbles[i]. */
    static const uint8_t same[EIGHT] = {0, 1, 2, 3, 4, 5, 6, 7};
    for (size_t k = 0; k < r.columns; k += EIGHT)
        for (size_t n = 0; n < r.rows; n += 4 * EIGHT) {
            const size_t squares = r.rows - n < 4 * EIGHT ? (r.rows - n) / EIGHT : 4;
            u32x4 in[EIGHT] = {0}, out[EIGHT];
            for (size_t s = 0; s < squares; s++)
                for (size_t i = 0; i < EIGHT; i++) in[i][s] = load(rows + (n + s * EIGHT + o->nibbles[i]) * row_bytes + k / 2);
            transpose_nibbles(in, same, out); /* out[c]: k + c */
            for (size_t c = 0; c < EIGHT; c++)
                memcpy(stored + (r.column + k + c) * r.n / 2 + (r.row + n) / 2, &out[c], squares * 4);
        }
}
