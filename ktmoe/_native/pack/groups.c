/* Headers of groups: scales and zero points, copied in their native bytes; see groups.h. */
#include "pack/groups.h"

#include <string.h>

#include "base/numbers.h"
#include "ktmoe.h"
#include "pack/transpose.h"

enum { LINE_BYTES = 64, LINE_COPIES = LINE_BYTES / sizeof(float) };

static const struct kind {
    size_t bytes;
    uint32_t one;          /* its bits */
    uint32_t field, shift; /* of the exponent: its bits, and where they begin; a scale that has them all is no real number */
} kinds[] = {
    [KT_UE8M0] = {1, 127, 0xFF, 0},
    [KT_E4M3] = {1, 0x38, 0x7F, 0}, /* only 0x7F is NaN */
    [KT_BF16_SCALES] = {2, 0x3F80, 0x7F80, 7},
    [KT_FP16_SCALES] = {2, 0x3C00, 0x7C00, 10},
    [KT_FP32_LINE] = {4, 0x3F800000, 0x7F800000, 23},
};

kt_groups kt_groups_of(const kt_format *f, size_t k) {
    kt_groups g = {.blocks = kt_round_up(k, KT_BLOCK) / KT_BLOCK, .block_bytes = f->packing->block_bytes, .halves = 1};
    if (!f->scale_group) return g;
    g.halves = f->scale_group < KT_BLOCK ? KT_BLOCK / f->scale_group : 1;
    g.header_shift = f->scale_group < KT_BLOCK ? 0 : __builtin_ctzl(f->scale_group / KT_BLOCK);
    g.scales_bytes = f->scale == KT_FP32_LINE ? LINE_BYTES : KT_PANEL * kinds[f->scale].bytes;
    g.header_bytes = g.halves * g.scales_bytes + (f->zero_points ? KT_PANEL : 0);
    return g;
}

static size_t groups_along(const kt_format *f, size_t k) { return (k + f->scale_group - 1) / f->scale_group; }

size_t kt_scales_bytes(const kt_format *f, size_t columns) {
    return f->scale_group ? groups_along(f, columns) * kinds[f->scale].bytes : 0;
}

size_t kt_zero_points_bytes(const kt_format *f, size_t columns) { return f->zero_points ? groups_along(f, columns) : 0; }

static uint32_t load(const uint8_t *from, size_t bytes) {
    uint32_t bits = 0;
    memcpy(&bits, from, bytes);
    return bits;
}

/* bytes: a constant where this is called, since a copy of one or two is a call otherwise. */
ALWAYS_INLINE void copy_row(const kt_groups *g, const uint8_t *from, size_t count, uint8_t *to, const size_t bytes) {
    const size_t stride = kt_header_at(g, 1);
    if (g->halves == 1) {
        for (size_t i = 0; i < count; i++) memcpy(to + i * stride, from + i * bytes, bytes);
        return;
    }
    for (size_t i = 0; i < count; i++) memcpy(to + i / 2 * stride + i % 2 * g->scales_bytes, from + i * bytes, bytes);
}

/* Apart from the copy, so that it vectorises. Zeros are not the least. */
ALWAYS_INLINE void scan_row(enum kt_scale_kind kind, const uint8_t *from, size_t count, kt_scan *scan, const size_t bytes) {
    const uint32_t field = kinds[kind].field, shift = kinds[kind].shift, magnitude = bytes == 1 ? 0xFF : 0x7FFF;
    if (kind == KT_E4M3) {
        uint8_t refused = 0;
        for (size_t i = 0; i < count; i++) refused |= (from[i] & 0x7F) == 0x7F;
        scan->refused |= refused;
        return;
    }
    uint32_t low = ~0u, high = 0;
    for (size_t i = 0; i < count; i++) {
        uint16_t bits = 0;
        memcpy(&bits, from + i * bytes, bytes);
        const uint32_t scale = bits & magnitude, less = bytes == 1 ? scale : scale - 1;
        low = less < low ? less : low;
        high = scale > high ? scale : high;
    }
    scan->refused |= (high & field) == field;
    if (bytes == 2 && !high) return;
    const uint8_t least = (uint8_t)((bytes == 1 ? low : low + 1) >> shift), most = (uint8_t)(high >> shift);
    scan->low = least < scan->low ? least : scan->low;
    scan->high = most > scan->high ? most : scan->high;
}

static void pack_lines(const kt_shard_matrix *m, const kt_groups *g, const uint8_t *from, uint8_t *packed, kt_scan *scan) {
    for (size_t h = 0; h < kt_headers(g); h++) {
        const uint32_t bits = load(from + h * sizeof bits, sizeof bits);
        scan->refused |= (bits & kinds[m->format->scale].field) == kinds[m->format->scale].field;
        for (size_t i = 0; i < LINE_COPIES; i++) memcpy(packed + kt_header_at(g, h) + i * sizeof bits, &bits, sizeof bits);
    }
}

static void pad_column(const kt_groups *g, size_t first, uint8_t *to, const struct kind *kind) {
    for (size_t i = first; i < kt_headers(g) * g->halves; i++)
        memcpy(to + kt_header_at(g, i / g->halves) + i % g->halves * g->scales_bytes, &kind->one, kind->bytes);
}

void kt_pack_headers(const kt_shard_matrix *m, size_t panel, uint8_t *packed, kt_scan *scan) {
    const kt_format *f = m->format;
    if (!f->scale_group) return;
    const kt_groups g = kt_groups_of(f, m->k);
    const struct kind *kind = &kinds[f->scale];
    const size_t first = panel * KT_PANEL, count = groups_along(f, m->k), column = m->column / f->scale_group;
    const size_t stride = kt_scales_bytes(f, m->stored.k), zeros_stride = kt_zero_points_bytes(f, m->stored.k);
    const uint8_t *scales = m->stored.scales + column * kind->bytes;
    if (f->scale == KT_FP32_LINE) {
        pack_lines(m, &g, scales + (m->row + first) / f->scale_rows * stride, packed, scan);
        return;
    }
    for (size_t c = 0; c < KT_PANEL; c++) {
        const bool inside = first + c < m->n;
        uint8_t *to = packed + c * kind->bytes;
        pad_column(&g, inside ? count : 0, to, kind);
        if (!inside) continue;
        const uint8_t *from = scales + (m->row + first + c) * stride;
        if (kind->bytes == 1) {
            copy_row(&g, from, count, to, 1);
            scan_row(f->scale, from, count, scan, 1);
        } else {
            copy_row(&g, from, count, to, 2);
            scan_row(f->scale, from, count, scan, 2);
        }
    }
    for (size_t c = 0; f->zero_points && c < KT_PANEL; c++)
        for (size_t h = 0; h < count; h++)
            packed[kt_header_at(&g, h) + g.scales_bytes + c] =
                first + c < m->n ? m->stored.zero_points[(m->row + first + c) * zeros_stride + column + h] : 0;
}

/* Header by header, as the panel lies in memory: waiting for scales alone, each on a cache line far from the next, took half of the
 * time. */
ALWAYS_INLINE void unpack_scales(const kt_groups *g, const uint8_t *packed, size_t rows, size_t count, uint8_t *scales,
                                 const size_t bytes) {
    for (size_t i = 0; i < count; i++) {
        const uint8_t *from = packed + kt_header_at(g, i / g->halves) + i % g->halves * g->scales_bytes;
        for (size_t c = 0; c < rows; c++) memcpy(scales + (c * count + i) * bytes, from + c * bytes, bytes);
    }
}

void kt_unpack_headers(const kt_format *f, const uint8_t *packed, size_t rows, size_t k, uint8_t *scales,
                       uint8_t *zero_points) {
    if (!f->scale_group) return;
    const kt_groups g = kt_groups_of(f, k);
    const size_t count = groups_along(f, k);
    if (f->scale == KT_FP32_LINE)
        unpack_scales(&g, packed, 1, count, scales, sizeof(float));
    else if (kinds[f->scale].bytes == 1)
        unpack_scales(&g, packed, rows, count, scales, 1);
    else
        unpack_scales(&g, packed, rows, count, scales, 2);
    for (size_t h = 0; f->zero_points && h < count; h++)
        for (size_t c = 0; c < rows; c++) zero_points[c * count + h] = packed[kt_header_at(&g, h) + g.scales_bytes + c];
}
