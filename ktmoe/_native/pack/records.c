/* Records to codes and arrays of scales, and back.
 *
 * SHAPES      records [n][k / weights] of so many bytes; codes, one a byte, [weights]; items of a field [item_bytes]
 * DEFINITION  code = plus + sum over planes of (piece << shift);  byte of an item = plus + sum over moves of (bits << shift)
 * LAYOUT      byte c * run + i of a plane has, from its lowest bits up, the pieces of weights (c * pieces + p) * run + i, p = 0, 1 ...
 * REGULARITIES a plane's runs are most often 8 bytes or more: then whole words, or vectors, of bytes are shifted and masked alike.
 */
#include "pack/records.h"

#include <string.h>

#include "pack/transpose.h"

typedef uint64_t u64;
typedef uint64_t u64x2 __attribute__((vector_size(16)));

static const u64 EACH = 0x0101010101010101;

/* One plane of so many records, whose runs are whole words of a type; or and first: whether codes are added to. */
#define PLANES_OF(type)                                                                                                    \
    ALWAYS_INLINE void to_codes_##type(const kt_plane p, const kt_records *o, const uint8_t *from, size_t records,         \
                                       uint8_t *codes, const size_t bits, const bool first) {                              \
        const size_t pieces = 8 / bits, bytes = (size_t)o->weights / pieces, step = o->bytes;                              \
        for (const uint8_t *end = from + records * step; from < end; from += step)                                         \
            for (size_t chunk = 0; chunk < bytes; chunk += p.run, codes += p.run * pieces)                                 \
                for (size_t i = 0; i < p.run; i += sizeof(type)) {                                                         \
                    type word;                                                                                             \
                    memcpy(&word, from + p.offset + chunk + i, sizeof word);                                               \
                    for (size_t piece = 0; piece < pieces; piece++) {                                                      \
                        type code = (word >> piece * bits & EACH * ((1u << bits) - 1)) << (u64)p.shift, before = {0};      \
                        if (!first) memcpy(&before, codes + piece * p.run + i, sizeof before);                             \
                        code |= before;                                                                                    \
                        memcpy(codes + piece * p.run + i, &code, sizeof code);                                             \
                    }                                                                                                      \
                }                                                                                                          \
    }                                                                                                                      \
    ALWAYS_INLINE void from_codes_##type(const kt_plane p, const kt_records *o, const uint8_t *codes, size_t records,      \
                                         uint8_t *to, const size_t bits) {                                                 \
        const size_t pieces = 8 / bits, bytes = (size_t)o->weights / pieces, step = o->bytes;                              \
        for (const uint8_t *end = to + records * step; to < end; to += step)                                               \
            for (size_t chunk = 0; chunk < bytes; chunk += p.run, codes += p.run * pieces)                                 \
                for (size_t i = 0; i < p.run; i += sizeof(type)) {                                                         \
                    type word = {0}, code;                                                                                 \
                    for (size_t piece = 0; piece < pieces; piece++) {                                                      \
                        memcpy(&code, codes + piece * p.run + i, sizeof code);                                             \
                        word |= (code >> (u64)p.shift & EACH * ((1u << bits) - 1)) << piece * bits;                        \
                    }                                                                                                      \
                    memcpy(to + p.offset + chunk + i, &word, sizeof word);                                                 \
                }                                                                                                          \
    }
PLANES_OF(u64x2)
PLANES_OF(u64)
PLANES_OF(uint8_t)

/* Of bytes whose bits are of eight weights one after another: bit i <-> bit `shift` of byte i. */
static void bits_to_codes(const kt_plane p, const kt_records *o, const uint8_t *from, size_t records, uint8_t *codes,
                          bool first) {
    const size_t bytes = o->weights / 8u, step = o->bytes;
    for (size_t r = 0; r < records; r++)
        for (size_t i = 0; i < bytes; i++, codes += 8) {
            const u64 apart = from[r * step + p.offset + i] * EACH & 0x8040201008040201;
            u64 code = ((apart + EACH * 0x7F) >> 7 & EACH) << p.shift, before = 0;
            if (!first) memcpy(&before, codes, sizeof before);
            code |= before;
            memcpy(codes, &code, sizeof code);
        }
}

static void bits_from_codes(const kt_plane p, const kt_records *o, const uint8_t *codes, size_t records, uint8_t *to) {
    const size_t bytes = o->weights / 8u, step = o->bytes;
    for (size_t r = 0; r < records; r++)
        for (size_t i = 0; i < bytes; i++, codes += 8) {
            u64 code;
            memcpy(&code, codes, sizeof code);
            to[r * step + p.offset + i] = (uint8_t)((code >> p.shift & EACH) * 0x0102040810204080 >> 56);
        }
}

/* With a plane's bits, and whether it is the first, as constants. */
#define OF_BITS(type, n)                                                             \
    case n:                                                                          \
        if (first)                                                                   \
            to_codes_##type(p, o, from, records, codes, n, true);                    \
        else                                                                         \
            to_codes_##type(p, o, from, records, codes, n, false);                   \
        return;
#define FROM_BITS(type, n) \
    case n: from_codes_##type(p, o, codes, records, to, n); return;
#define PLANE_OF(type)                                                                                                \
    static void plane_to_##type(const kt_plane p, const kt_records *o, const uint8_t *from, size_t records,           \
                                uint8_t *codes, bool first) {                                                         \
        switch (p.bits) { OF_BITS(type, 1) OF_BITS(type, 2) OF_BITS(type, 4) OF_BITS(type, 8) }                       \
    }                                                                                                                 \
    static void plane_from_##type(const kt_plane p, const kt_records *o, const uint8_t *codes, size_t records,        \
                                  uint8_t *to) {                                                                      \
        switch (p.bits) { FROM_BITS(type, 1) FROM_BITS(type, 2) FROM_BITS(type, 4) FROM_BITS(type, 8) }               \
    }
PLANE_OF(u64x2)
PLANE_OF(u64)
PLANE_OF(uint8_t)

static void plane_to_codes(const kt_plane p, const kt_records *o, const uint8_t *from, size_t records, uint8_t *codes,
                           bool first) {
    if (p.bits == 1 && p.run == 1)
        bits_to_codes(p, o, from, records, codes, first);
    else if (p.run % 16 == 0)
        plane_to_u64x2(p, o, from, records, codes, first);
    else if (p.run % 8 == 0)
        plane_to_u64(p, o, from, records, codes, first);
    else
        plane_to_uint8_t(p, o, from, records, codes, first);
}

static void plane_from_codes(const kt_plane p, const kt_records *o, const uint8_t *codes, size_t records, uint8_t *to) {
    if (p.bits == 1 && p.run == 1)
        bits_from_codes(p, o, codes, records, to);
    else if (p.run % 16 == 0)
        plane_from_u64x2(p, o, codes, records, to);
    else if (p.run % 8 == 0)
        plane_from_u64(p, o, codes, records, to);
    else
        plane_from_uint8_t(p, o, codes, records, to);
}

/* Codes of so many planes at a time, so that they stay in L1. */
enum { TOGETHER = 4096 };

/* Even codes to the low nibbles of bytes, odd ones to the high nibbles; both 16 bytes at a time, and what is left one by one. */
static void to_nibbles(const uint8_t *codes, size_t bytes, uint8_t plus, uint8_t *rows) {
    size_t i = 0;
    for (; i + 16 <= bytes; i += 16) {
        u8x16 v[2];
        memcpy(v, codes + 2 * i, sizeof v);
        for (int half = 0; half < 2; half++) {
            v[half] = (v[half] + plus) & 15;
            v[half] |= (u8x16)((u16x8)v[half] >> 4);
        }
        const u8x16 row = SHUFFLE(u8x16, v[0], v[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        memcpy(rows + i, &row, sizeof row);
    }
    for (; i < bytes; i++) rows[i] = (uint8_t)(((codes[2 * i] + plus) & 15) | (codes[2 * i + 1] + plus) << 4);
}

static void from_nibbles(const uint8_t *rows, size_t bytes, uint8_t plus, uint8_t *codes) {
    for (size_t i = 0; i < bytes; i++) {
        codes[2 * i] = (uint8_t)((rows[i] & 15) - plus);
        codes[2 * i + 1] = (uint8_t)((rows[i] >> 4) - plus);
    }
}

/* So many records together that their codes are at most TOGETHER. */
static size_t records_at_a_time(const kt_records *o) { return TOGETHER / o->weights; }

void kt_records_to_rows(const kt_records *o, const uint8_t *from, size_t records, uint8_t *rows) {
    uint8_t buffer[TOGETHER];
    for (size_t most = records_at_a_time(o), many; records; records -= many, from += many * o->bytes) {
        many = records < most ? records : most;
        const size_t codes = many * o->weights;
        uint8_t *to = o->code_bits == 4 ? buffer : rows;
        for (size_t p = 0; p < o->planes; p++) plane_to_codes(o->plane[p], o, from, many, to, p == 0);
        if (o->code_bits == 4)
            to_nibbles(buffer, codes / 2, o->plus, rows);
        else if (o->plus)
            for (size_t i = 0; i < codes; i++) rows[i] = (uint8_t)(rows[i] + o->plus);
        rows += codes * o->code_bits / 8;
    }
}

void kt_records_from_rows(const kt_records *o, const uint8_t *rows, size_t records, uint8_t *to) {
    uint8_t buffer[TOGETHER];
    for (size_t most = records_at_a_time(o), many; records; records -= many, to += many * o->bytes) {
        many = records < most ? records : most;
        const size_t codes = many * o->weights;
        if (o->code_bits == 4)
            from_nibbles(rows, codes / 2, o->plus, buffer);
        else
            for (size_t i = 0; i < codes; i++) buffer[i] = (uint8_t)(rows[i] - o->plus);
        for (size_t p = 0; p < o->planes; p++) plane_from_codes(o->plane[p], o, buffer, many, to);
        rows += codes * o->code_bits / 8;
    }
}

/* A move of so many records: items |= bits of records, or records |= bits of items. */
#define MOVE(type)                                                                                                       \
    static void move_##type(const kt_move m, uint8_t *records, size_t step, uint8_t *items, size_t items_step,           \
                            size_t count, bool to_records) {                                                             \
        const type mask = (type)(EACH * ((1u << m.bits) - 1));                                                           \
        for (records += m.from, items += m.to; count--; records += step, items += items_step) {                          \
            type record, item;                                                                                           \
            memcpy(&record, records, sizeof record), memcpy(&item, items, sizeof item);                                  \
            if (to_records) {                                                                                            \
                record |= (type)((type)(item >> m.shift & mask) << m.first);                                             \
                memcpy(records, &record, sizeof record);                                                                 \
            } else {                                                                                                     \
                item |= (type)((type)(record >> m.first & mask) << m.shift);                                             \
                memcpy(items, &item, sizeof item);                                                                       \
            }                                                                                                            \
        }                                                                                                                \
    }
MOVE(uint8_t)
MOVE(uint16_t)
MOVE(uint32_t)
MOVE(uint64_t)

static void move(const kt_move m, uint8_t *records, size_t step, uint8_t *items, size_t items_step, size_t count,
                 bool to_records) {
    switch (m.count) {
        case 1: move_uint8_t(m, records, step, items, items_step, count, to_records); break;
        case 2: move_uint16_t(m, records, step, items, items_step, count, to_records); break;
        case 4: move_uint32_t(m, records, step, items, items_step, count, to_records); break;
        default: move_uint64_t(m, records, step, items, items_step, count, to_records);
    }
}

/* Bytes of records that no plane has become 0. */
static void clear_fields(const kt_records *o, uint8_t *records, size_t count) {
    for (size_t at = 0; at < o->bytes;) {
        size_t next = o->bytes, end = at;
        for (size_t p = 0; p < o->planes; p++) {
            const size_t first = o->plane[p].offset, last = first + (size_t)o->weights * o->plane[p].bits / 8;
            if (first <= at && at < last)
                end = last;
            else if (first > at && first < next)
                next = first;
        }
        if (end > at) {
            at = end;
            continue;
        }
        for (size_t r = 0; r < count; r++) memset(records + r * o->bytes + at, 0, next - at);
        at = next;
    }
}

static bool spare_bits(const kt_records *o, const uint8_t *records, size_t count) {
    uint8_t set = 0;
    for (size_t i = 0; i < o->spares; i++)
        for (size_t r = 0; r < count; r++) set |= records[r * o->bytes + o->spare[i].byte] & o->spare[i].mask;
    return set;
}

bool kt_fields_read(const kt_records *o, const kt_fields *fields, const uint8_t *stored, kt_rectangle r) {
    const size_t count = r.columns / o->weights;
    bool spare = false;
    for (size_t row = r.row; row < r.row + r.rows; row++) {
        const size_t first = (row * r.k + r.column) / o->weights;
        const uint8_t *records = stored + first * o->bytes;
        for (const kt_field *f = fields->field; f < fields->field + fields->count; f++) {
            uint8_t *items = f->items + first * f->item_bytes;
            memset(items, 0, count * f->item_bytes);
            for (const kt_move *m = f->move; m < f->move + f->moves; m++)
                move(*m, (uint8_t *)records, o->bytes, items, f->item_bytes, count, false);
            for (size_t i = 0; f->plus && i < count * f->item_bytes; i++) items[i] = (uint8_t)(items[i] + f->plus);
        }
        spare |= spare_bits(o, records, count);
    }
    return spare;
}

void kt_fields_write(const kt_records *o, const kt_fields *fields, uint8_t *stored, kt_rectangle r) {
    const size_t count = r.columns / o->weights;
    for (size_t row = r.row; row < r.row + r.rows; row++) {
        const size_t first = (row * r.k + r.column) / o->weights;
        uint8_t *records = stored + first * o->bytes;
        clear_fields(o, records, count);
        for (const kt_field *f = fields->field; f < fields->field + fields->count; f++) {
            uint8_t *items = f->items + first * f->item_bytes;
            for (size_t i = 0; f->plus && i < count * f->item_bytes; i++) items[i] = (uint8_t)(items[i] - f->plus);
            for (const kt_move *m = f->move; m < f->move + f->moves; m++)
                move(*m, records, o->bytes, items, f->item_bytes, count, true);
        }
    }
}
