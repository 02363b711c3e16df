/* Panels of one family: rows of codes to columns of blocks and back, four columns at a time.
 *
 * A packing file defines, before it includes this:
 *     BLOCK_BYTES, ROW_BYTES       of 32 k: of a packed panel, of a row of codes
 *     column_at(column)            where a column begins in a block
 *     pack_four(format, from, stride_bytes, to)  four columns of one block, from rows stride_bytes apart, to the block at the first's
 *                                  column. Returns dwords that are not 0 where a code is no real number
 *     unpack_four(format, from, to, stride_bytes)
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

/* 16 rows together, since 16 columns fill a cache line of the panel; within them as many blocks as fill one of the source. So a
 * line of either is in L1 until it is done with. Of 4 and 8 bits the next 16 rows are fetched meanwhile: they are too short for the
 * hardware to foresee, and up to half of the time went into waiting. With 16 bits it foresees them, and fetching costs 10 %. */
static bool pack_codes(const kt_shard_matrix *m, const uint8_t *rows, size_t stride_bytes, size_t count, uint8_t *packed) {
    const kt_groups g = kt_groups_of(m->format, m->k);
    const size_t whole = m->k / KT_BLOCK;
    u32x4 wrong = {0};
    for (size_t sixteen = 0; sixteen < KT_PANEL; sixteen += 16)
        for (size_t line = 0; line < g.blocks; line += LINE_BLOCKS) {
            const size_t blocks = g.blocks - line < LINE_BLOCKS ? g.blocks - line : LINE_BLOCKS;
            uint8_t *to[LINE_BLOCKS];
            for (size_t b = 0; b < blocks; b++) to[b] = packed + kt_block_at(&g, line + b);
            for (size_t column = sixteen; column < sixteen + 16; column += 4) {
                const uint8_t *four = rows + column * stride_bytes + line * ROW_BYTES;
                const bool inside = column + 4 <= count;
                for (size_t i = 16; i < 20 && LINE_BLOCKS > 1; i++) __builtin_prefetch(four + i * stride_bytes);
                for (size_t b = 0; b < blocks; b++)
                    wrong |= inside && line + b < whole
                                 ? pack_four(m->format, four + b * ROW_BYTES, stride_bytes, to[b] + column_at(column))
                                 : pack_tail(m, rows + column * stride_bytes, stride_bytes, count > column ? count - column : 0,
                                             line + b, to[b] + column_at(column));
            }
        }
    return (wrong[0] | wrong[1] | wrong[2] | wrong[3]) == 0;
}

static void unpack_codes(const kt_format *f, const uint8_t *packed, size_t count, size_t k, uint8_t *rows) {
    const kt_groups g = kt_groups_of(f, k);
    const size_t row_bytes = k * f->packing->code_bits / 8;
    for (size_t b = 0; b < g.blocks; b++)
        for (size_t column = 0; column < count; column += 4) {
            const uint8_t *from = packed + kt_block_at(&g, b) + column_at(column);
            const size_t at = b * ROW_BYTES, left = row_bytes - at < ROW_BYTES ? row_bytes - at : ROW_BYTES;
            uint8_t *to = rows + column * row_bytes + at, four[4][ROW_BYTES];
            if (column + 4 <= count && left == ROW_BYTES) {
                unpack_four(f, from, to, row_bytes);
                continue;
            }
            unpack_four(f, from, four[0], ROW_BYTES);
            for (size_t i = 0; i < 4 && column + i < count; i++) memcpy(to + i * row_bytes, four[i], left);
        }
}
