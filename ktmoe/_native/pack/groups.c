/* Headers of groups: scales and zero points, copied in their native bytes; see groups.h. */
#include "pack/groups.h"

#include <string.h>

#include "base/numbers.h"
#include "base/stream.h"
#include "ktmoe.h"
#include "pack/order.h"
#include "pack/transpose.h"

enum { LINE_COPIES = KT_LINE / sizeof(float) };

kt_groups kt_groups_of(const kt_format *f, size_t k) {
    const kt_scale *s = &f->scale;
    kt_groups g = {.blocks = kt_round_up(k, KT_BLOCK) / KT_BLOCK, .block_bytes = f->packing->block_bytes, .halves = 1};
    if (!s->group) return g;
    g.halves = s->group < KT_BLOCK ? KT_BLOCK / s->group : 1;
    g.header_shift = s->group < KT_BLOCK ? 0 : __builtin_ctzl(s->group / KT_BLOCK);
    g.scales_bytes = s->rows > 1 ? KT_LINE : KT_PANEL * s->bytes;
    g.header_bytes = g.halves * g.scales_bytes + (f->zero_points ? KT_PANEL : 0);
    return g;
}

static size_t groups_along(const kt_format *f, size_t k) { return (k + f->scale.group - 1) / f->scale.group; }

size_t kt_scales_bytes(const kt_format *f, size_t columns) {
    return f->scale.group ? groups_along(f, columns) * f->scale.bytes : 0;
}

size_t kt_zero_points_bytes(const kt_format *f, size_t columns) { return f->zero_points ? groups_along(f, columns) : 0; }

/* Of a row's scales: all bits that any has, and the least and the greatest magnitude; the least is less by `zero`, so that with 1 a
 * scale of zero is the greatest. */
typedef struct extremes {
    uint32_t any, least, greatest;
} extremes;

/* Apart from the copy and with numbers as wide as the scales, so that it vectorises. */
#define EXTREMES(type)                                                                              \
    static extremes extremes_##type(const uint8_t *from, size_t count, type magnitude, type zero) { \
        type any = 0, low = (type) - 1, high = 0;                                                   \
        for (size_t i = 0; i < count; i++) {                                                        \
            type bits;                                                                              \
            memcpy(&bits, from + i * sizeof bits, sizeof bits);                                     \
            any |= bits;                                                                            \
            bits &= magnitude;                                                                      \
            const type less = (type)(bits - zero);                                                  \
            low = less < low ? less : low;                                                          \
            high = bits > high ? bits : high;                                                       \
        }                                                                                           \
        return (extremes){any, low, high};                                                          \
    }
EXTREMES(uint8_t)
EXTREMES(uint16_t)

/* Zeros are not the least, where a scale may be zero: where it has a sign. */
static void scan_row(const kt_scale *s, const uint8_t *from, size_t count, kt_scan *scan) {
    const bool zeros = !(s->magnitude >> (8 * s->bytes - 1));
    const int shift = __builtin_ctz(s->field);
    const extremes e = s->bytes == 1 ? extremes_uint8_t(from, count, (uint8_t)s->magnitude, zeros)
                                     : extremes_uint16_t(from, count, (uint16_t)s->magnitude, zeros);
    scan->negative |= (e.any & ~s->magnitude) != 0;
    scan->refused |= (e.greatest & s->field) == s->field;
    if (zeros && !e.greatest) return;
    const uint8_t least = (uint8_t)((e.least + zeros) >> shift), most = (uint8_t)(e.greatest >> shift);
    scan->low = least < scan->low ? least : scan->low;
    scan->high = most > scan->high ? most : scan->high;
}

static void pack_lines(const kt_shard_matrix *m, const kt_groups *g, const uint8_t *from, uint8_t *packed, kt_scan *scan) {
    for (size_t h = 0; h < kt_headers(g); h++) {
        _Alignas(KT_LINE) uint8_t line[KT_LINE];
        uint32_t bits;
        memcpy(&bits, from + h * sizeof bits, sizeof bits);
        scan->refused |= (bits & m->format->scale.field) == m->format->scale.field;
        for (size_t i = 0; i < LINE_COPIES; i++) memcpy(line + i * sizeof bits, &bits, sizeof bits);
        kt_stream(packed + kt_header_at(g, h), KT_LINE, line, 1);
    }
}

/* What a panel's headers have of one array: rows of 64 numbers, one for each of its columns. */
typedef struct header_rows {
    const uint8_t *from; /* the first column's numbers, along k */
    size_t stride, bytes;
    size_t columns, count; /* there are so many */
    uint32_t padding;      /* in place of the others */
    size_t halves, place;  /* rows in a header, from there on */
} header_rows;

/* Some rows at a time become columns in L1, and are written as whole lines. */
static void pack_rows(const kt_groups *g, const header_rows *r, uint8_t *packed) {
    enum { ROWS = 16 };
    _Alignas(KT_LINE) uint8_t lines[ROWS][KT_PANEL * sizeof(uint16_t)];
    const size_t row_bytes = KT_PANEL * r->bytes, rows = kt_headers(g) * r->halves;
    for (size_t first = 0; first < rows; first += ROWS) {
        const size_t many = rows - first < ROWS ? rows - first : ROWS;
        const size_t there = first >= r->count ? 0 : r->count - first < many ? r->count - first : many;
        if (there < many || r->columns < KT_PANEL)
            for (size_t i = 0; i < many * KT_PANEL; i++) memcpy(lines[0] + i * r->bytes, &r->padding, r->bytes);
        kt_transpose(r->from + first * r->bytes, r->stride, r->columns, there, lines[0], row_bytes, r->bytes);
        for (size_t i = 0; i < many; i++) {
            const size_t row = first + i;
            uint8_t *to = packed + kt_header_at(g, row / r->halves) + r->place + row % r->halves * row_bytes;
            kt_stream(to, KT_LINE, lines[0] + i * row_bytes, row_bytes / KT_LINE);
        }
    }
}

void kt_pack_headers(const kt_shard_matrix *m, size_t panel, uint8_t *packed, kt_scan *scan) {
    const kt_format *f = m->format;
    const kt_scale *s = &f->scale;
    if (!s->group) return;
    const kt_groups g = kt_groups_of(f, m->k);
    const size_t first = panel * KT_PANEL, row = m->row + first, column = m->column / s->group;
    const size_t stride = kt_scales_bytes(f, m->stored.k), zeros_stride = kt_zero_points_bytes(f, m->stored.k);
    const uint8_t *scales = m->stored.scales + column * s->bytes;
    if (s->rows > 1) {
        pack_lines(m, &g, scales + row / s->rows * stride, packed, scan);
        return;
    }
    header_rows r = {.columns = m->n - first < KT_PANEL ? m->n - first : KT_PANEL, .count = groups_along(f, m->k)};
    r.from = scales + row * stride, r.stride = stride, r.bytes = s->bytes, r.padding = s->one, r.halves = g.halves;
    for (size_t c = 0; c < r.columns; c++) scan_row(s, r.from + c * stride, r.count, scan);
    pack_rows(&g, &r, packed);
    if (!f->zero_points) return;
    r.from = m->stored.zero_points + row * zeros_stride + column, r.stride = zeros_stride, r.bytes = 1, r.padding = 0;
    r.halves = 1, r.place = g.scales_bytes;
    pack_rows(&g, &r, packed);
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
    if (!f->scale.group) return;
    const kt_groups g = kt_groups_of(f, k);
    const size_t count = groups_along(f, k);
    if (f->scale.rows > 1)
        unpack_scales(&g, packed, 1, count, scales, sizeof(float));
    else if (f->scale.bytes == 1)
        unpack_scales(&g, packed, rows, count, scales, 1);
    else
        unpack_scales(&g, packed, rows, count, scales, 2);
    for (size_t h = 0; f->zero_points && h < count; h++)
        for (size_t c = 0; c < rows; c++) zero_points[c * count + h] = packed[kt_header_at(&g, h) + g.scales_bytes + c];
}
