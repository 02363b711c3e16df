/* Panels of one family: rows of codes to columns of blocks and back, four columns at a time.
 *
 * A packing file defines, before it includes this:
 *     BLOCK_BYTES, ROW_BYTES       of 32 k: of a packed panel at most, of a row of codes
 *     pack_four(format, from, stride_bytes, to)  four columns of one block, from rows stride_bytes apart, to a quarter of each line of
 *                                  their 16 columns, the lines side by side. Returns dwords that are not 0 where a code is no real
 *                                  number
 *     stream_lines(format, block, column, lines)  writes such lines, of all 16 columns from `column` on, to where a block has them
 *     unpack_four(format, block, column, to, stride_bytes)  the inverse of pack_four(), from a block
 */
#include "base/numbers.h"
#include "ktmoe.h"
#include "pack/groups.h"
#include "pack/transpose.h"

/* Blocks whose bytes of a row fill a cache line. */
enum { LINE_BLOCKS = ROW_BYTES < 64 ? 64 / ROW_BYTES : 1 };

/* Four rows of one block, some of which are not there, or end in it. Not inlined: it is rare, and would take registers. */
static __attribute__((noinline)) u32x4 pack_tail(const kt_shard_matrix *m, const uint8_t *rows, size_t stride_bytes,
                                                 size_t count, size_t block, uint8_t *to) {
    const size_t bits = m->format->packing->code_bits, offset = block * ROW_BYTES, left = m->k * bits / 8 - offset;
    uint8_t padded[4][ROW_BYTES];
    memset(padded, bits == 4 ? m->format->padding * 0x11 : m->format->padding, sizeof padded);
    for (size_t i = 0; i < count && i < 4; i++)
        memcpy(padded[i], rows + i * stride_bytes + offset, left < ROW_BYTES ? left : ROW_BYTES);
    return pack_four(m->format, padded[0], ROW_BYTES, to);
}

/* 16 rows together, and of them as many blocks as fill a cache line of the source: so each line is read once. What they become is put
 * together in L1 and written in whole lines past the caches. Meanwhile the same line of the next 16 rows is fetched into L2: the
 * hardware does not foresee rows this short, and in L1 they would take the places of those at hand. */
static bool pack_codes(const kt_shard_matrix *m, const uint8_t *rows, size_t stride_bytes, size_t count, uint8_t *packed) {
    const kt_groups g = kt_groups_of(m->format, m->k);
    const size_t whole = m->k / KT_BLOCK;
    _Alignas(64) uint8_t lines[LINE_BLOCKS][BLOCK_BYTES * KT_LINE_COLUMNS / KT_PANEL];
    u32x4 wrong = {0};
    for (size_t first = 0; first < KT_PANEL; first += KT_LINE_COLUMNS)
        for (size_t line = 0; line < g.blocks; line += LINE_BLOCKS) {
            const size_t blocks = g.blocks - line < LINE_BLOCKS ? g.blocks - line : LINE_BLOCKS;
            for (size_t column = 0; column < KT_LINE_COLUMNS; column += 4) {
                const uint8_t *four = rows + (first + column) * stride_bytes + line * ROW_BYTES;
                const bool inside = first + column + 4 <= count;
                for (size_t i = KT_LINE_COLUMNS; i < KT_LINE_COLUMNS + 4; i++)
                    __builtin_prefetch(four + i * stride_bytes, 0, 2);
                for (size_t b = 0; b < blocks; b++)
                    wrong |=
                        inside && line + b < whole
                            ? pack_four(m->format, four + b * ROW_BYTES, stride_bytes, lines[b] + column * 4)
                            : pack_tail(m, rows + (first + column) * stride_bytes, stride_bytes,
                                        count > first + column ? count - first - column : 0, line + b, lines[b] + column * 4);
            }
            for (size_t b = 0; b < blocks; b++) stream_lines(m->format, packed + kt_block_at(&g.at, line + b), first, lines[b]);
        }
    return (wrong[0] | wrong[1] | wrong[2] | wrong[3]) == 0;
}

static void unpack_codes(const kt_format *f, const uint8_t *packed, size_t count, size_t k, uint8_t *rows) {
    const kt_groups g = kt_groups_of(f, k);
    const size_t row_bytes = k * f->packing->code_bits / 8;
    for (size_t b = 0; b < g.blocks; b++)
        for (size_t column = 0; column < count; column += 4) {
            const size_t at = b * ROW_BYTES, left = row_bytes - at < ROW_BYTES ? row_bytes - at : ROW_BYTES;
            uint8_t *to = rows + column * row_bytes + at, four[4][ROW_BYTES];
            if (column + 4 <= count && left == ROW_BYTES) {
                unpack_four(f, packed + kt_block_at(&g.at, b), column, to, row_bytes);
                continue;
            }
            unpack_four(f, packed + kt_block_at(&g.at, b), column, four[0], ROW_BYTES);
            for (size_t i = 0; i < 4 && column + i < count; i++) memcpy(to + i * row_bytes, four[i], left);
        }
}

/* One column of a panel: its row of codes. */
static void unpack_row(const kt_format *f, const uint8_t *packed, size_t column, size_t k, uint8_t *row) {
    const kt_groups g = kt_groups_of(f, k);
    const size_t row_bytes = k * f->packing->code_bits / 8;
    for (size_t b = 0; b < g.blocks; b++) {
        const size_t at = b * ROW_BYTES, left = row_bytes - at < ROW_BYTES ? row_bytes - at : ROW_BYTES;
        uint8_t four[4][ROW_BYTES];
        unpack_four(f, packed + kt_block_at(&g.at, b), column / 4 * 4, four[0], ROW_BYTES);
        memcpy(row + at, four[column % 4], left);
    }
}
