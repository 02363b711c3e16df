/* Packing grid and ternary: records, transposed byte by byte, and back; see layout.h. */
#include "base/stream.h"
#include "ktmoe.h"
#include "pack/pack.h"

enum { LINE_BYTES = 64, TOGETHER = 16 };

static uint8_t byte_of(const uint8_t *record, const kt_byte *b) {
    uint32_t bytes = 0;
    for (int i = 0; i < 2; i++) {
        const kt_bits *p = &b->of[i];
        const uint32_t copies = record[p->byte] * UINT32_C(0x01010101);
        bytes |= (copies << p->rotate | copies >> (-p->rotate & 31)) & p->mask;
    }
    return (uint8_t)bytes;
}

static size_t row_bytes_of(const kt_format *f, size_t k) { return k / KT_SUPER_GROUP * f->grid->record_bytes; }

/* Whether a row's super-scales are real numbers. */
static bool real(const kt_grid *g, const uint8_t *row, size_t row_bytes) {
    enum { EXPONENT = 0x7C }; /* in the upper byte of fp16 */
    bool all = true;
    for (const uint8_t *record = row; record < row + row_bytes; record += g->record_bytes)
        all &= (byte_of(record, &g->super[1]) & EXPONENT) != EXPONENT;
    return all;
}

/* Of all rows as many bytes together as make whole lines in L1. The same of the next ones is fetched: the hardware does not foresee so
 * many rows. */
static bool pack_codes(const kt_shard_matrix *m, const uint8_t *rows, size_t stride_bytes, size_t count, uint8_t *packed) {
    const size_t row_bytes = row_bytes_of(m->format, m->k);
    _Alignas(LINE_BYTES) uint8_t lines[TOGETHER][KT_PANEL] = {0}; /* what no row fills stays zero */
    for (size_t at = 0; at < row_bytes; at += TOGETHER) {
        const size_t bytes = row_bytes - at < TOGETHER ? row_bytes - at : TOGETHER;
        if (at % LINE_BYTES == 0 && at + LINE_BYTES < row_bytes)
            for (size_t i = 0; i < count; i++) __builtin_prefetch(rows + i * stride_bytes + at + LINE_BYTES, 0, 2);
        kt_transpose(rows + at, stride_bytes, count, bytes, lines[0], KT_PANEL, 1);
        kt_stream(packed + at * KT_PANEL, LINE_BYTES, lines[0], bytes);
    }
    bool all = true;
    for (size_t i = 0; i < count; i++) all &= real(m->format->grid, rows + i * stride_bytes, row_bytes);
    return all;
}

static void unpack_codes(const kt_format *f, const uint8_t *packed, size_t count, size_t k, uint8_t *rows) {
    const size_t row_bytes = row_bytes_of(f, k);
    kt_transpose(packed, KT_PANEL, row_bytes, count, rows, row_bytes, 1);
}

static void unpack_row(const kt_format *f, const uint8_t *packed, size_t column, size_t k, uint8_t *row) {
    const size_t row_bytes = row_bytes_of(f, k);
    for (size_t b = 0; b < row_bytes; b++) row[b] = packed[b * KT_PANEL + column];
}

const kt_packing kt_pack_grid = {"grid", 0, 1, 0, 0, pack_codes, unpack_codes, unpack_row};
const kt_packing kt_pack_ternary = {"ternary", 0, 1, 0, 0, pack_codes, unpack_codes, unpack_row};
