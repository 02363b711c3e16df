/* Source orders: codes as a checkpoint has them to rows along k, low nibble first, and back.
 *
 * SHAPES      dwords of eight codes: along k [n][k/8] or, transposed, [k/8][n]; along n [k][n/8]
 * DEFINITION  nibble i of a dword, from the lowest bits up, is code nibbles[i] of its eight
 */
#include "pack/order.h"

#include <string.h>

#include "pack/transpose.h"

enum { EIGHT = 8 };

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

void kt_order_to_rows(const kt_order *o, const uint8_t *stored, kt_rectangle r, uint8_t *rows, size_t row_bytes) {
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
