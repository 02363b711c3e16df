/* Records to codes and arrays of scales, and back.
 *
 * SHAPES      records [n][k / weights] of so many bytes; codes, one a byte, [weights]; items of a field [item_bytes]
 * DEFINITION  code = sum over planes of (piece << shift);  byte of an item = plus + sum over moves of (bits << shift)
 * LAYOUT      byte c * run + i of a plane has, from its lowest bits up, the pieces of weights (c * pieces + p) * run + i, p = 0, 1 ...
 * REGULARITIES a plane's runs are most often 8 bytes or more: then whole words, or vectors, of bytes are shifted and masked alike.
 */
#include "pack/records.h"

#include <string.h>

#include "pack/transpose.h"

typedef uint64_t u64x2 __attribute__((vector_size(16)));

static const uint64_t EACH = 0x0101010101010101; /* byte */

static inline u8x16 load(const uint8_t *p) {
    u8x16 v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* Records come from memory, and are read once; the hardware alone does not fetch them far enough ahead. */
static inline u8x16 load_ahead(const uint8_t *p) {
    enum { AHEAD = 2048 };
    __builtin_prefetch(p + AHEAD);
    return load(p);
}

static inline void store(uint8_t *p, u8x16 v) { memcpy(p, &v, sizeof v); }

static inline u8x16 splat(unsigned byte) { return (u8x16){0} + (uint8_t)byte; }

/* Moves so many bits of each byte, from bit `from` on, to bit `to`. */
ALWAYS_INLINE u8x16 piece_of(u8x16 v, unsigned from, const size_t bits, unsigned to) {
    return (u8x16)((u16x8)((u8x16)((u16x8)v >> (uint16_t)from) & splat((1u << bits) - 1)) << (uint16_t)to);
}

/* Adds a plane's bits to the codes of so many records; the first plane's are all that there is. The plane's runs are whole
 * vectors. */
ALWAYS_INLINE void vectors_to_codes(const kt_plane p, const kt_records *o, const uint8_t *from, size_t records, uint8_t *codes,
                                    const size_t bits, const bool first) {
    const size_t pieces = 8 / bits, bytes = o->weights / pieces, step = o->bytes, run = p.run;
    for (const uint8_t *end = from + records * step; from < end; from += step)
        for (size_t chunk = 0; chunk < bytes; chunk += run, codes += run * pieces)
            for (size_t i = 0; i < run; i += 16) {
                const u8x16 v = load_ahead(from + p.offset + chunk + i);
                for (size_t piece = 0; piece < pieces; piece++) {
                    uint8_t *to = codes + piece * run + i;
                    store(to, (first ? splat(0) : load(to)) | piece_of(v, piece * bits, bits, p.shift));
                }
            }
}

ALWAYS_INLINE void vectors_from_codes(const kt_plane p, const kt_records *o, const uint8_t *codes, size_t records, uint8_t *to,
                                      const size_t bits) {
    const size_t pieces = 8 / bits, bytes = o->weights / pieces, step = o->bytes, run = p.run;
    for (const uint8_t *end = to + records * step; to < end; to += step)
        for (size_t chunk = 0; chunk < bytes; chunk += run, codes += run * pieces)
            for (size_t i = 0; i < run; i += 16) {
                u8x16 v = {0};
                for (size_t piece = 0; piece < pieces; piece++)
                    v |= piece_of(load(codes + piece * run + i), p.shift, bits, piece * bits);
                store(to + p.offset + chunk + i, v);
            }
}

/* Adds the bits of a plane with any runs to codes, code by code. */
static void bytes_to_codes(const kt_plane p, const kt_records *o, const uint8_t *from, size_t records, uint8_t *codes,
                           bool first) {
    const size_t pieces = 8u / p.bits, bytes = o->weights / pieces, mask = (1u << p.bits) - 1;
    for (size_t r = 0; r < records; r++, from += o->bytes)
        for (size_t chunk = 0; chunk < bytes; chunk += p.run)
            for (size_t piece = 0; piece < pieces; piece++)
                for (size_t i = 0; i < p.run; i++, codes++)
                    *codes =
                        (uint8_t)((first ? 0 : *codes) | ((from[p.offset + chunk + i] >> piece * p.bits & mask) << p.shift));
}

static void bytes_from_codes(const kt_plane p, const kt_records *o, const uint8_t *codes, size_t records, uint8_t *to) {
    const size_t pieces = 8u / p.bits, bytes = o->weights / pieces, mask = (1u << p.bits) - 1;
    for (size_t r = 0; r < records; r++, to += o->bytes) {
        memset(to + p.offset, 0, bytes);
        for (size_t chunk = 0; chunk < bytes; chunk += p.run)
            for (size_t piece = 0; piece < pieces; piece++)
                for (size_t i = 0; i < p.run; i++)
                    to[p.offset + chunk + i] |= (uint8_t)((*codes++ >> p.shift & mask) << piece * p.bits);
    }
}

/* Adds the bits of planes whose bytes have the bits of eight codes side by side, four bytes at a time: each is copied to eight,
 * of which each shows one of its bits. */
static void bits_to_codes(const kt_plane p, const kt_records *o, const uint8_t *from, size_t records, uint8_t *codes,
                          bool first) {
    const u8x16 own = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128}, bit = splat(1u << p.shift);
    for (size_t r = 0; r < records; r++, from += o->bytes)
        for (size_t at = 0; at < o->weights / 8u; at += 4) {
            uint8_t four[4];
            memcpy(four, from + p.offset + at, sizeof four);
            const u64x2 eights[2] = {{four[0] * EACH, four[1] * EACH}, {four[2] * EACH, four[3] * EACH}};
            for (size_t half = 0; half < 2; half++, codes += 16) {
                const u8x16 set = (u8x16)(((u8x16)eights[half] & own) == own) & bit;
                store(codes, (first ? splat(0) : load(codes)) | set);
            }
        }
}

/* Writes the bits of planes whose runs are words of eight bytes, by integers. */
static void words_from_codes(const kt_plane p, const kt_records *o, const uint8_t *codes, size_t records, uint8_t *to) {
    const size_t pieces = 8u / p.bits, bytes = o->weights / pieces, run = p.run;
    const uint64_t mask = EACH * ((1u << p.bits) - 1);
    for (size_t r = 0; r < records; r++, to += o->bytes)
        for (size_t chunk = 0; chunk < bytes; chunk += run, codes += run * pieces)
            for (size_t i = 0; i < run; i += 8) {
                uint64_t word = 0, eight;
                for (size_t piece = 0; piece < pieces; piece++) {
                    memcpy(&eight, codes + piece * run + i, sizeof eight);
                    word |= (eight >> p.shift & mask) << piece * p.bits;
                }
                memcpy(to + p.offset + chunk + i, &word, sizeof word);
            }
}

/* Writes the bits of planes of single bits in runs of one, eight at a time: a product brings them together in its highest
 * byte. */
static void bits_from_codes(const kt_plane p, const kt_records *o, const uint8_t *codes, size_t records, uint8_t *to) {
    for (size_t r = 0; r < records; r++, to += o->bytes)
        for (size_t at = 0; at < o->weights / 8u; at++, codes += 8) {
            uint64_t eight;
            memcpy(&eight, codes, sizeof eight);
            to[p.offset + at] = (uint8_t)((eight >> p.shift & EACH) * 0x0102040810204080u >> 56);
        }
}

/* Calls with a plane's bits, and whether it is the first, as constants. */
#define TO_CODES(bits)                                                 \
    case bits:                                                         \
        if (first)                                                     \
            vectors_to_codes(p, o, from, records, codes, bits, true);  \
        else                                                           \
            vectors_to_codes(p, o, from, records, codes, bits, false); \
        return;

static void plane_to_codes(const kt_plane p, const kt_records *o, const uint8_t *from, size_t records, uint8_t *codes,
                           bool first) {
    if (p.bits == 1 && p.run == 1 && o->weights % 32 == 0) {
        bits_to_codes(p, o, from, records, codes, first);
    } else if (p.run % 16) {
        bytes_to_codes(p, o, from, records, codes, first);
    } else {
        switch (p.bits) { TO_CODES(1) TO_CODES(2) TO_CODES(4) TO_CODES(8) }
    }
}

static void plane_from_codes(const kt_plane p, const kt_records *o, const uint8_t *codes, size_t records, uint8_t *to) {
    if (p.bits == 1 && p.run == 1 && o->weights % 8 == 0) {
        bits_from_codes(p, o, codes, records, to);
        return;
    }
    if (p.run % 16) {
        (p.run % 8 ? bytes_from_codes : words_from_codes)(p, o, codes, records, to);
        return;
    }
    switch (p.bits) {
        case 1: vectors_from_codes(p, o, codes, records, to, 1); return;
        case 2: vectors_from_codes(p, o, codes, records, to, 2); return;
        case 4: vectors_from_codes(p, o, codes, records, to, 4); return;
        default: vectors_from_codes(p, o, codes, records, to, 8);
    }
}

/* 16 codes below 16 to eight bytes, twice: the lower nibble of each is the even code. */
static inline u8x16 to_nibbles(u8x16 a, u8x16 b) {
    a |= (u8x16)((u16x8)a >> 4), b |= (u8x16)((u16x8)b >> 4);
    return SHUFFLE(u8x16, a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}

/* Turns a plane of all four bits, in runs of 8 or of whole vectors, into rows of nibbles, without codes between. */
static void plane_to_nibbles(const kt_plane p, const kt_records *o, const uint8_t *from, size_t records, uint8_t *rows) {
    const size_t bytes = o->weights / 2u, step = o->bytes, run = p.run, half = run / 2;
    for (const uint8_t *end = from + records * step; from < end; from += step)
        for (size_t chunk = 0; chunk < bytes; chunk += run < 16 ? 16 : run)
            for (size_t i = 0; i < run; i += 16, rows += 16) {
                const u8x16 v = load_ahead(from + p.offset + chunk + i), low = piece_of(v, 0, 4, 0),
                            high = piece_of(v, 4, 4, 0);
                const u32x4 row = (u32x4)to_nibbles(low, high);
                if (run == 8) {
                    store(rows, (u8x16)SHUFFLE(u32x4, row, row, 0, 2, 1, 3));
                } else { /* of the run's low nibbles, and of its high ones */
                    memcpy(rows - i / 2, &row, 8);
                    memcpy(rows - i / 2 + half, (const uint8_t *)&row + 8, 8);
                }
            }
}

/* Most codes that are made at a time, plane after plane, so that they stay in L1. */
enum { TOGETHER = 4096 };

/* The records whose codes are at most TOGETHER. */
static size_t records_at_a_time(const kt_records *o) { return TOGETHER / o->weights; }

static void codes_to_nibbles(const uint8_t *codes, size_t bytes, uint8_t *rows) {
    size_t i = 0;
    for (; i + 16 <= bytes; i += 16) store(rows + i, to_nibbles(load(codes + 2 * i), load(codes + 2 * i + 16)));
    for (; i < bytes; i++) rows[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
}

static void codes_from_nibbles(const uint8_t *rows, size_t bytes, uint8_t *codes) {
    for (size_t i = 0; i < bytes; i++) {
        codes[2 * i] = rows[i] & 15;
        codes[2 * i + 1] = rows[i] >> 4;
    }
}

void kt_records_to_rows(const kt_records *o, const uint8_t *from, size_t records, uint8_t *rows) {
    uint8_t buffer[TOGETHER];
    const kt_plane *p = o->plane;
    if (o->code_bits == 4 && p->bits == 4 && (p->run == 8 || p->run % 16 == 0) && o->weights % 32 == 0) {
        plane_to_nibbles(*p, o, from, records, rows);
        return;
    }
    for (size_t most = records_at_a_time(o), many; records; records -= many, from += many * o->bytes) {
        many = records < most ? records : most;
        const size_t codes = many * o->weights;
        uint8_t *to = o->code_bits == 4 ? buffer : rows;
        for (size_t i = 0; i < o->planes; i++) plane_to_codes(p[i], o, from, many, to, i == 0);
        if (o->code_bits == 4) codes_to_nibbles(buffer, codes / 2, rows);
        rows += codes * o->code_bits / 8;
    }
}

void kt_records_from_rows(const kt_records *o, const uint8_t *rows, size_t records, uint8_t *to) {
    uint8_t buffer[TOGETHER];
    for (size_t most = records_at_a_time(o), many; records; records -= many, to += many * o->bytes) {
        many = records < most ? records : most;
        const size_t codes = many * o->weights;
        if (o->code_bits == 4) codes_from_nibbles(rows, codes / 2, buffer);
        const uint8_t *from = o->code_bits == 4 ? buffer : rows;
        for (size_t i = 0; i < o->planes; i++) plane_from_codes(o->plane[i], o, from, many, to);
        rows += codes * o->code_bits / 8;
    }
}

/* A move of so many records: bits of records to items, or back, where these are 0 before; or only a look whether one is set. */
enum direction { LOOK, TO_ITEMS, TO_RECORDS };

#define MOVE(type)                                                                                                           \
    static bool move_##type(const kt_move m, uint8_t *records, size_t step, uint8_t *items, size_t items_step, size_t count, \
                            const enum direction way) {                                                                      \
        const type mask = (type)(EACH * ((1u << m.bits) - 1));                                                               \
        const bool whole = m.bits == 8;                                                                                      \
        type any = 0, record, item;                                                                                          \
        records += m.from;                                                                                                   \
        if (items) items += m.to;                                                                                            \
        if (way == TO_ITEMS && whole)                                                                                        \
            for (; count--; records += step, items += items_step) memcpy(items, records, sizeof item);                       \
        else if (way == TO_RECORDS && whole)                                                                                 \
            for (; count--; records += step, items += items_step) memcpy(records, items, sizeof record);                     \
        else if (way == TO_ITEMS)                                                                                            \
            for (; count--; records += step, items += items_step) {                                                          \
                memcpy(&record, records, sizeof record), memcpy(&item, items, sizeof item);                                  \
                item |= (type)((type)(record >> m.first & mask) << m.shift);                                                 \
                memcpy(items, &item, sizeof item);                                                                           \
            }                                                                                                                \
        else if (way == TO_RECORDS)                                                                                          \
            for (; count--; records += step, items += items_step) {                                                          \
                memcpy(&record, records, sizeof record), memcpy(&item, items, sizeof item);                                  \
                record |= (type)((type)(item >> m.shift & mask) << m.first);                                                 \
                memcpy(records, &record, sizeof record);                                                                     \
            }                                                                                                                \
        else                                                                                                                 \
            for (; count--; records += step) {                                                                               \
                memcpy(&record, records, sizeof record);                                                                     \
                any |= record >> m.first & mask;                                                                             \
            }                                                                                                                \
        return any;                                                                                                          \
    }
MOVE(uint8_t)
MOVE(uint16_t)
MOVE(uint32_t)
MOVE(uint64_t)

static bool move(const kt_move m, uint8_t *records, size_t step, uint8_t *items, size_t items_step, size_t count,
                 enum direction way) {
    switch (m.count) {
        case 1: return move_uint8_t(m, records, step, items, items_step, count, way);
        case 2: return move_uint16_t(m, records, step, items, items_step, count, way);
        case 4: return move_uint32_t(m, records, step, items, items_step, count, way);
        default: return move_uint64_t(m, records, step, items, items_step, count, way);
    }
}

/* Bytes of records that no plane has become 0. */
static void clear_fields(const kt_records *o, uint8_t *records, size_t count) {
    for (size_t at = 0; at < o->bytes;) {
        size_t end = at;
        for (size_t p = 0; p < o->planes; p++) {
            const size_t first = o->plane[p].offset, last = first + (size_t)o->weights * o->plane[p].bits / 8;
            if (first <= at && at < last) end = last;
        }
        if (end == at)
            for (size_t r = 0; r < count; r++) records[r * o->bytes + at] = 0;
        at += end == at ? 1 : end - at;
    }
}

/* Reads a field of the records from `first` on into its array of items. */
static void read_field(const kt_records *o, const kt_field *f, uint8_t *records, size_t first, size_t count) {
    uint8_t *items = f->items + first * f->item_bytes;
    const bool whole = f->moves == 1 && f->move[0].bits == 8 && f->move[0].count == f->item_bytes; /* no bit is left over */
    if (!whole) memset(items, 0, count * f->item_bytes);
    for (const kt_move *m = f->move; m < f->move + f->moves; m++)
        move(*m, records, o->bytes, items, f->item_bytes, count, TO_ITEMS);
    for (size_t i = 0; f->plus && i < count * f->item_bytes; i++) items[i] = (uint8_t)(items[i] + f->plus);
}

static void write_field(const kt_records *o, const kt_field *f, uint8_t *records, size_t first, size_t count) {
    uint8_t *items = f->items + first * f->item_bytes;
    for (size_t i = 0; f->plus && i < count * f->item_bytes; i++) items[i] = (uint8_t)(items[i] - f->plus);
    for (const kt_move *m = f->move; m < f->move + f->moves; m++)
        move(*m, records, o->bytes, items, f->item_bytes, count, TO_RECORDS);
}

bool kt_fields_read(const kt_records *o, const kt_fields *fields, const uint8_t *stored, kt_rectangle r) {
    const size_t count = r.columns / o->weights;
    bool spare = false;
    for (size_t row = r.row; row < r.row + r.rows; row++) {
        const size_t first = (row * r.k + r.column) / o->weights;
        uint8_t *records = (uint8_t *)stored + first * o->bytes; /* not written */
        for (size_t i = 0; i < fields->count; i++) read_field(o, &fields->field[i], records, first, count);
        for (size_t i = 0; i < o->spares; i++) spare |= move(o->spare[i], records, o->bytes, NULL, 0, count, LOOK);
    }
    return spare;
}

void kt_fields_write(const kt_records *o, const kt_fields *fields, uint8_t *stored, kt_rectangle r) {
    const size_t count = r.columns / o->weights;
    for (size_t row = r.row; row < r.row + r.rows; row++) {
        const size_t first = (row * r.k + r.column) / o->weights;
        uint8_t *records = stored + first * o->bytes;
        clear_fields(o, records, count);
        for (size_t i = 0; i < fields->count; i++) write_field(o, &fields->field[i], records, first, count);
    }
}
