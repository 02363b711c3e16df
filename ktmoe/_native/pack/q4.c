/* Packing q4, 4-bit codes with a scale per group of k: a checkpoint's bytes to panels and back, exactly.
 *
 * LAYOUT of a panel: groups in ascending k, each the 64 scales of its columns in their native bytes, then its blocks of 32 k:
 *
 *     scale of (column c, group g) at        g * (64 * scale_bytes + group / 32 * 1024) + c * scale_bytes
 *     block b (k = 32 b ...) at              b * 1024 + (b / (group / 32) + 1) * 64 * scale_bytes
 *     code dword of (column c, k..k+7) at    its block + (c / 16) * 256 + (k % 32 / 8) * 64 + (c % 16) * 4
 *     its nibbles, low to high:              k0 k2 k4 k6 | k1 k3 k5 k7
 *
 * so a 64-byte vector holds 8 k of 16 columns, and its words shifted right by 0, 4, 8, 12 hold the k-pairs (0,1), (2,3),
 * (4,5), (6,7) in the low bits of each column's two words: the pair order of VDPBF16PS and TDPBF16PS. k is padded to 32, so
 * that the last group may be shorter. Padding (columns beyond n, k beyond the matrix) has the code of zero and the scale 1.
 */
#include "base/numbers.h"
#include "ktmoe.h"
#include "pack/pack.h"
#include "pack/transpose.h"

enum { BLOCK_BYTES = KT_PANEL * KT_BLOCK / 2, ROW_BYTES = KT_BLOCK / 2 };

typedef struct shape {
    size_t blocks, per_group, scales_bytes; /* of a panel; blocks a group; bytes of a group's scales */
} shape;

static shape shape_of(const kt_format *f, size_t k) {
    return (shape){kt_round_up(k, KT_BLOCK) / KT_BLOCK, f->scale_group / KT_BLOCK, KT_PANEL * f->scale_bytes};
}

static size_t groups_of(shape s) { return (s.blocks + s.per_group - 1) / s.per_group; }
static size_t block_at(shape s, size_t b) { return b * BLOCK_BYTES + (b / s.per_group + 1) * s.scales_bytes; }
static size_t scales_at(shape s, size_t g) { return g * (s.scales_bytes + s.per_group * BLOCK_BYTES); }

static size_t panel_bytes(const kt_format *f, size_t k) {
    const shape s = shape_of(f, k);
    return s.blocks * BLOCK_BYTES + groups_of(s) * s.scales_bytes;
}

/* k0 k1 .. k7 from the lowest nibble up -> k0 k2 k4 k6 k1 k3 k5 k7, in four dwords: a dword is 8 k of one row. */
static inline u32x4 split_pairs(u32x4 v) {
    u32x4 even = v & 0x0F0F0F0F, odd = v >> 4 & 0x0F0F0F0F;
    even = (even | even >> 4) & 0x00FF00FF;
    odd = (odd | odd >> 4) & 0x00FF00FF;
    even = (even | even >> 8) & 0x0000FFFF;
    odd = (odd | odd >> 8) << 16;
    return even | odd;
}

static inline u32x4 join_pairs(u32x4 v) {
    u32x4 even = v & 0x0000FFFF, odd = v >> 16;
    even = (even | even << 8) & 0x00FF00FF;
    odd = (odd | odd << 8) & 0x00FF00FF;
    even = (even | even << 4) & 0x0F0F0F0F;
    odd = (odd | odd << 4) & 0x0F0F0F0F;
    return even | odd << 4;
}

static size_t column_at(size_t column) { return column / 16 * 256 + column % 16 * 4; }

/* Four columns of one block, 16 code bytes each. */
static inline void pack_four(const uint8_t *const rows[4], size_t offset, uint8_t *to) {
    u32x4 v[4];
    for (int i = 0; i < 4; i++) {
        memcpy(&v[i], rows[i] + offset, sizeof v[i]);
        v[i] = split_pairs(v[i]);
    }
    store_transposed(v, to, 64);
}

static void pack_tail(const kt_stored *s, size_t row, size_t block, uint8_t *to) {
    const uint8_t padding = s->format->zero_code | (uint8_t)(s->format->zero_code << 4);
    uint8_t bytes[ROW_BYTES];
    memset(bytes, padding, sizeof bytes);
    if (row < s->n) {
        const size_t offset = block * ROW_BYTES, left = s->k / 2 - offset;
        memcpy(bytes, s->codes + row * s->codes_stride_bytes + offset, left < ROW_BYTES ? left : ROW_BYTES);
    }
    u32x4 v;
    memcpy(&v, bytes, sizeof v);
    v = split_pairs(v);
    for (int j = 0; j < 4; j++) memcpy(to + j * 64, (uint32_t *)&v + j, 4);
}

/* 16 rows together, since 16 columns fill a cache line of the panel; within them four blocks together, since they fill one of
 * the source. So a line of either is in L1 until it is done with, and memory sees 16 ascending streams. */
static void pack_codes(const kt_stored *s, shape p, size_t first, uint8_t *packed) {
    enum { LINE_BLOCKS = 64 / ROW_BYTES };
    const size_t whole = s->k / KT_BLOCK;
    for (size_t sixteen = 0; sixteen < KT_PANEL; sixteen += 16)
        for (size_t line = 0; line < p.blocks; line += LINE_BLOCKS)
            for (size_t column = sixteen; column < sixteen + 16; column += 4) {
                const size_t row = first + column, end = line + LINE_BLOCKS < p.blocks ? line + LINE_BLOCKS : p.blocks;
                const uint8_t *rows[4];
                for (size_t i = 0; i < 4; i++) rows[i] = s->codes + (row + i) * s->codes_stride_bytes;
                for (size_t b = line; b < end; b++) {
                    uint8_t *to = packed + block_at(p, b);
                    if (row + 4 <= s->n && b < whole)
                        pack_four(rows, b * ROW_BYTES, to + column_at(column));
                    else
                        for (size_t i = 0; i < 4; i++) pack_tail(s, row + i, b, to + column_at(column + i));
                }
            }
}

static inline __attribute__((always_inline)) void pack_scales(const kt_stored *s, shape p, size_t first, uint8_t *packed,
                                                              kt_scan *scan, const size_t bytes) {
    const size_t groups = groups_of(p), stride = scales_at(p, 1);
    for (size_t column = 0; column < KT_PANEL; column++) {
        uint8_t *to = packed + column * bytes;
        if (first + column >= s->n) {
            for (size_t g = 0; g < groups; g++) memcpy(to + g * stride, &s->format->scale_one, bytes);
            continue;
        }
        const uint8_t *from = s->scales + (first + column) * s->scales_stride_bytes;
        for (size_t g = 0; g < groups; g++) memcpy(to + g * stride, from + g * bytes, bytes);
        /* Apart from the copy, so that it vectorises. */
        if (bytes == 1) {
            uint8_t low = scan->low, high = scan->high;
            for (size_t g = 0; g < groups; g++) {
                low = from[g] < low ? from[g] : low;
                high = from[g] > high ? from[g] : high;
            }
            *scan = (kt_scan){low, high, scan->refused || high == 255}; /* UE8M0's NaN */
        } else {
            uint16_t low = 0xFFFF, high = 0; /* of magnitudes; low is one less, so that zero is not the least */
            for (size_t g = 0; g < groups; g++) {
                uint16_t scale;
                memcpy(&scale, from + 2 * g, 2);
                scale &= 0x7FFF;
                low = (uint16_t)(scale - 1) < low ? (uint16_t)(scale - 1) : low;
                high = scale > high ? scale : high;
            }
            if (!high) continue;
            const uint8_t least = (uint8_t)((low + 1) >> 7), most = (uint8_t)(high >> 7);
            scan->low = least < scan->low ? least : scan->low;
            scan->high = most > scan->high ? most : scan->high;
            scan->refused |= most == 255; /* infinity, NaN */
        }
    }
}

static void pack_panel(const kt_stored *s, size_t panel, uint8_t *packed, kt_scan *scan) {
    const shape p = shape_of(s->format, s->k);
    pack_codes(s, p, panel * KT_PANEL, packed);
    if (s->format->scale_bytes == 1)
        pack_scales(s, p, panel * KT_PANEL, packed, scan, 1);
    else
        pack_scales(s, p, panel * KT_PANEL, packed, scan, 2);
}

/* Four columns of one block; the last three, and a block that k ends in, by way of bytes of their own. */
static inline void unpack_four(const uint8_t *from, size_t columns, size_t count_bytes, uint8_t *to, size_t row_bytes) {
    u32x4 v[4];
    for (int j = 0; j < 4; j++) {
        memcpy(&v[j], from + j * 64, sizeof v[j]);
        v[j] = join_pairs(v[j]);
    }
    if (columns == 4 && count_bytes == ROW_BYTES) {
        store_transposed(v, to, row_bytes);
        return;
    }
    uint8_t rows[4][ROW_BYTES];
    store_transposed(v, rows[0], ROW_BYTES);
    for (size_t i = 0; i < columns; i++) memcpy(to + i * row_bytes, rows[i], count_bytes);
}

/* Group by group, as the panel lies in memory: waiting for scales alone, each on a cache line far from the next, took half of the
 * time. bytes: a constant where this is called, since a copy of one or two is a call otherwise. */
static inline __attribute__((always_inline)) void unpack_groups(shape p, const uint8_t *packed, size_t rows, size_t row_bytes,
                                                                uint8_t *codes, uint8_t *scales, const size_t bytes) {
    const size_t groups = groups_of(p);
    for (size_t g = 0; g < groups; g++) {
        for (size_t column = 0; column < rows; column++)
            memcpy(scales + (column * groups + g) * bytes, packed + scales_at(p, g) + column * bytes, bytes);
        for (size_t b = g * p.per_group; b < p.blocks && b < (g + 1) * p.per_group; b++) {
            const size_t at = b * ROW_BYTES, left = row_bytes - at;
            for (size_t column = 0; column < rows; column += 4)
                unpack_four(packed + block_at(p, b) + column_at(column), rows - column < 4 ? rows - column : 4,
                            left < ROW_BYTES ? left : ROW_BYTES, codes + column * row_bytes + at, row_bytes);
        }
    }
}

static void unpack_panel(const kt_format *f, const uint8_t *packed, size_t rows, size_t k, uint8_t *codes, uint8_t *scales) {
    if (f->scale_bytes == 1)
        unpack_groups(shape_of(f, k), packed, rows, k / 2, codes, scales, 1);
    else
        unpack_groups(shape_of(f, k), packed, rows, k / 2, codes, scales, 2);
}

const kt_packing kt_pack_q4 = {"q4", 4, panel_bytes, pack_panel, unpack_panel};
