/* Headers of groups: scales, offsets and their super-scales, copied in their native bytes; see layout.h. */
#include "pack/groups.h"

#include <string.h>

#include "base/numbers.h"
#include "base/stream.h"
#include "ktmoe.h"
#include "pack/order.h"
#include "pack/transpose.h"

enum { LINE_COPIES = KT_LINE / sizeof(float) };

/* The bytes of one of a panel's rows of numbers. */
static size_t row_bytes(const kt_group_array *a) { return a->rows > 1 ? KT_LINE : KT_PANEL * a->bytes; }

kt_groups kt_groups_of(const kt_format *f, size_t k) {
    const size_t group = f->groups[KT_SCALES].group;
    const size_t block_bytes = f->grid ? KT_PANEL * f->grid->record_bytes >> KT_SUPER_SHIFT : f->packing->block_bytes;
    const bool any = group || f->groups[KT_SUPER_SCALES].group;
    kt_groups g = {.at.block_bytes = block_bytes, .blocks = kt_round_up(k, KT_BLOCK) / KT_BLOCK, .halves = 1};
    if (!any) return g;
    g.halves = group && group < KT_BLOCK ? KT_BLOCK / group : 1;
    g.at.header_shift = group ? kt_header_shift(group) : 0;
    for (size_t i = 0; i < KT_GROUP_ARRAYS; i++) {
        const kt_group_array *a = &f->groups[i];
        const bool of_groups = i == KT_SCALES || i == KT_OFFSETS;
        size_t *bytes = of_groups ? &g.at.header_bytes : &g.at.super_bytes;
        g.places[i] = *bytes;
        if (a->group) *bytes += of_groups && !a->bits ? g.halves * row_bytes(a) : row_bytes(a);
    }
    g.upper_place = g.at.super_bytes;
    if (f->groups[KT_SCALES].bits == 6) g.at.super_bytes += KT_PANEL * sizeof(uint32_t);
    return g;
}

size_t kt_group_bytes(const kt_group_array *a, size_t columns) {
    return a->group ? (columns + a->group - 1) / a->group * a->bytes : 0;
}

/* What a row's scales have: all bits that any has, and the least and the greatest magnitude; the least is less by `zero`, so
 * that with 1 a scale of zero is the greatest. */
typedef struct extremes {
    uint32_t any, least, greatest;
} extremes;

/* This loop is apart from the copy, and its numbers are as wide as the scales, so that it vectorises. */
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
static void scan_row(const kt_group_array *s, const uint8_t *from, size_t count, kt_scan *scan) {
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

/* Where row i of an array is. */
static size_t row_at(const kt_groups *g, const kt_format *f, size_t array, size_t i) {
    if (array == KT_SUPER_SCALES || array == KT_SUPER_OFFSETS) return kt_super_header_at(&g->at, i) + g->places[array];
    const size_t in_header = f->groups[array].bits ? 0 : i % g->halves * row_bytes(&f->groups[array]);
    return kt_header_at(&g->at, i / g->halves) + g->places[array] + in_header;
}

static size_t rows_of(const kt_groups *g, size_t array) {
    return array == KT_SUPER_SCALES || array == KT_SUPER_OFFSETS ? kt_super_headers(g) : g->halves * kt_headers(g);
}

static void pack_lines(const kt_shard_matrix *m, const kt_groups *g, const uint8_t *from, uint8_t *packed, kt_scan *scan) {
    const uint32_t field = m->format->groups[KT_SCALES].field;
    for (size_t h = 0; h < kt_headers(g); h++) {
        _Alignas(KT_LINE) uint8_t line[KT_LINE];
        uint32_t bits;
        memcpy(&bits, from + h * sizeof bits, sizeof bits);
        scan->refused |= (bits & field) == field;
        for (size_t i = 0; i < LINE_COPIES; i++) memcpy(line + i * sizeof bits, &bits, sizeof bits);
        kt_stream(packed + kt_header_at(&g->at, h), KT_LINE, line, 1);
    }
}

/* What a panel has of one array: a row of numbers for each group along k. */
typedef struct panel_rows {
    size_t array;
    const uint8_t *from; /* the first column's numbers, along k */
    size_t stride, columns, count;
} panel_rows;

/* fp16 numbers, the highest bit of which is their sign. */
static void negate(uint8_t *numbers, size_t count) {
    for (size_t i = 0; i < count; i++) numbers[2 * i + 1] ^= 0x80;
}

/* Rows that become columns at a time: those of KT_SUPER_GROUP k where a scale is of 16. */
enum { ROWS = KT_SUPER_GROUP / KT_SCALE_GROUP_MIN };

/* Packs numbers of 4 or 6 bits, so many rows from row `first` on, in rows of a byte a number. Returns whether one has more bits. */
static bool pack_bits(const kt_format *f, const kt_groups *g, size_t array, size_t first, size_t many, const uint8_t *rows,
                      uint8_t *packed) {
    _Alignas(KT_LINE) uint8_t nibbles[KT_PANEL];
    _Alignas(KT_LINE) uint32_t upper[KT_PANEL] = {0};
    const kt_group_array *a = &f->groups[array];
    unsigned any = 0;
    for (size_t i = 0; i < many; i += 2, rows += 2 * KT_PANEL) {
        for (size_t c = 0; c < KT_PANEL; c++) {
            const uint8_t low = (uint8_t)(rows[c] + a->plus), high = (uint8_t)(rows[KT_PANEL + c] + a->plus);
            nibbles[c] = (uint8_t)((low & 15) | high << 4);
            upper[c] |= (uint32_t)((low >> 4 & 3) | (high >> 4 & 3) << 2) << 2 * i;
            any |= low | high;
        }
        kt_stream(packed + row_at(g, f, array, first + i), KT_LINE, nibbles, 1);
    }
    uint8_t *behind = packed + kt_super_header_at(&g->at, first / ROWS) + g->upper_place;
    if (a->bits == 6) kt_stream(behind, KT_LINE, (const uint8_t *)upper, sizeof upper / KT_LINE);
    return any >> a->bits;
}

/* The inverse: of so many columns from the first on, all rows. */
static void unpack_bits(const kt_format *f, const kt_groups *g, size_t array, const uint8_t *packed, size_t first,
                        size_t columns, size_t count, uint8_t *to) {
    const kt_group_array *a = &f->groups[array];
    for (size_t i = 0; i < count; i++) {
        const uint8_t *nibbles = packed + row_at(g, f, array, i) + first;
        const uint8_t *behind = packed + kt_super_header_at(&g->at, i / ROWS) + g->upper_place + first * sizeof(uint32_t);
        for (size_t c = 0; c < columns; c++) {
            uint32_t upper = 0;
            if (a->bits == 6) memcpy(&upper, behind + c * sizeof upper, sizeof upper);
            const uint32_t number = (nibbles[c] >> i % 2 * 4 & 15u) | (upper >> i % ROWS * 2 & 3) << 4;
            to[c * count + i] = (uint8_t)(number - a->plus);
        }
    }
}

/* Some rows at a time become columns in L1, and are written as whole lines. */
static void pack_rows(const kt_format *f, const kt_groups *g, const panel_rows *r, uint8_t *packed, kt_scan *scan) {
    _Alignas(KT_LINE) uint8_t lines[ROWS][KT_PANEL * sizeof(uint16_t)];
    const kt_group_array *a = &f->groups[r->array];
    const size_t rows = rows_of(g, r->array);
    for (size_t first = 0; first < rows; first += ROWS) {
        const size_t many = rows - first < ROWS ? rows - first : ROWS;
        const size_t there = first >= r->count ? 0 : r->count - first < many ? r->count - first : many;
        if (there < many || r->columns < KT_PANEL)
            for (size_t i = 0; i < many * KT_PANEL; i++) memcpy(lines[0] + i * a->bytes, &a->padding, a->bytes);
        kt_transpose(r->from + first * a->bytes, r->stride, r->columns, there, lines[0], row_bytes(a), a->bytes);
        for (size_t i = 0; a->negated && i < there; i++) negate(lines[0] + i * row_bytes(a), r->columns);
        if (a->bits) {
            scan->refused |= pack_bits(f, g, r->array, first, many, lines[0], packed);
            continue;
        }
        for (size_t i = 0; i < many; i++)
            kt_stream(packed + row_at(g, f, r->array, first + i), KT_LINE, lines[0] + i * row_bytes(a), row_bytes(a) / KT_LINE);
    }
}

void kt_pack_headers(const kt_shard_matrix *m, size_t panel, uint8_t *packed, kt_scan *scan) {
    const kt_format *f = m->format;
    const kt_groups g = kt_groups_of(f, m->k);
    const size_t first = panel * KT_PANEL, row = m->row + first;
    for (size_t i = 0; i < KT_GROUP_ARRAYS; i++) {
        const kt_group_array *a = &f->groups[i];
        if (!a->group) continue;
        panel_rows r = {.array = i, .stride = kt_group_bytes(a, m->stored.k), .count = (m->k + a->group - 1) / a->group};
        r.from = m->stored.groups[i] + row / a->rows * r.stride + m->column / a->group * a->bytes;
        r.columns = m->n - first < KT_PANEL ? m->n - first : KT_PANEL;
        if (a->rows > 1) {
            pack_lines(m, &g, r.from, packed, scan);
            continue;
        }
        kt_scan others = {.low = 255}; /* of what is no scale only whether it is refused */
        for (size_t c = 0; a->field && c < r.columns; c++)
            scan_row(a, r.from + c * r.stride, r.count, i == KT_SCALES ? scan : &others);
        scan->refused |= others.refused;
        pack_rows(f, &g, &r, packed, scan);
    }
}

/* Header by header, as the panel lies in memory: waiting for scales alone, each on a cache line far from the next, took half of the
 * time. */
ALWAYS_INLINE void unpack_array(const kt_format *f, const kt_groups *g, size_t array, const uint8_t *packed, size_t rows,
                                size_t count, uint8_t *to, const size_t bytes) {
    for (size_t i = 0; i < count; i++) {
        const uint8_t *from = packed + row_at(g, f, array, i);
        for (size_t c = 0; c < rows; c++) memcpy(to + (c * count + i) * bytes, from + c * bytes, bytes);
    }
}

void kt_unpack_headers(const kt_format *f, const uint8_t *packed, size_t first, size_t rows, size_t k, uint8_t *const *groups) {
    const kt_groups g = kt_groups_of(f, k);
    for (size_t i = 0; i < KT_GROUP_ARRAYS; i++) {
        const kt_group_array *a = &f->groups[i];
        if (!a->group) continue;
        const size_t count = (k + a->group - 1) / a->group;
        if (a->bits)
            unpack_bits(f, &g, i, packed, first, rows, count, groups[i]);
        else if (a->rows > 1)
            unpack_array(f, &g, i, packed, 1, count, groups[i], sizeof(float));
        else if (a->bytes == 1)
            unpack_array(f, &g, i, packed + first, rows, count, groups[i], 1);
        else
            unpack_array(f, &g, i, packed + first * 2, rows, count, groups[i], 2);
        if (a->negated) negate(groups[i], rows * count);
    }
}
