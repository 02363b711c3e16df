/* Records: so many codes along k, with their scales and minima, in so many bytes. ktmoe/weights/records.py says what is in them. */
#ifndef KT_RECORDS_H
#define KT_RECORDS_H

#include "base/placement.h"

enum { KT_PLANES_MAX = 4, KT_MOVES_MAX = 64, KT_FIELDS_MAX = 5, KT_RECORD_WEIGHTS_MAX = 1024 };

/* Some bits of each code: piece p of byte i of each `run` bytes is of weight p * run + i of as many pieces. */
typedef struct kt_plane {
    uint16_t offset, run;
    uint8_t bits, shift; /* of a code: so many, from that one up */
} kt_plane;

typedef struct kt_records {
    uint16_t weights, bytes; /* of a record; 0 bytes: codes do not stand in records */
    uint8_t code_bits;       /* of codes in rows: 4 or 8 */
    uint8_t plus;            /* to what the planes have */
    uint8_t planes;
    kt_plane plane[KT_PLANES_MAX];
} kt_records;

/* So many records to a row of codes, as packing takes it; and back, into the planes' bytes alone. */
void kt_records_to_rows(const kt_records *o, const uint8_t *from, size_t records, uint8_t *rows);
void kt_records_from_rows(const kt_records *o, const uint8_t *rows, size_t records, uint8_t *to);

/* `count` bytes of a record, 1, 2, 4 or 8: so many bits of each, from bit `first` up, to bit `shift` of as many bytes of items. */
typedef struct kt_move {
    uint16_t from, to;
    uint8_t count, first, bits, shift;
} kt_move;

/* Numbers that stand in each record, as a dense array. */
typedef struct kt_field {
    uint16_t item_bytes; /* of all items of a record */
    uint8_t plus;        /* to each byte */
    uint8_t moves;
    kt_move move[KT_MOVES_MAX];
    uint8_t *items; /* [records][item_bytes]; changed where they go to records */
} kt_field;

/* All fields of so many records. With the pool's lock held, by its threads; 0 or an errno. */
typedef struct kt_fields {
    const kt_records *order;
    uint8_t *records; /* bytes that no plane has are written, if to_records */
    size_t count;
    bool to_records;
    size_t num_fields;
    kt_field field[KT_FIELDS_MAX];
} kt_fields;
int kt_fields_move(const kt_placement *placement, const kt_fields *fields);

#endif
