/* Records: so many codes along k, with their scales and minima, in so many bytes. ktmoe/weights/records.py says what is in them. */
#ifndef KT_RECORDS_H
#define KT_RECORDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { KT_PLANES_MAX = 4, KT_MOVES_MAX = 64, KT_FIELDS_MAX = 4, KT_SPARES_MAX = 16, KT_RECORD_WEIGHTS_MAX = 1024 };

/* A rectangle of a matrix [n][k]; of 4-bit codes, all numbers are whole dwords of the order; of records, columns are whole ones. */
typedef struct kt_rectangle {
    size_t n, k, row, rows, column, columns;
} kt_rectangle;

/* Some bits of each code: piece p of byte i of each `run` bytes is of weight p * run + i of as many pieces. */
typedef struct kt_plane {
    uint16_t offset, run;
    uint8_t bits, shift; /* of a code: so many, from that one up */
} kt_plane;

/* `count` bytes of a record, 1, 2, 4 or 8: so many bits of each, from bit `first` up, to bit `shift` of as many bytes of items. */
typedef struct kt_move {
    uint16_t from, to;
    uint8_t count, first, bits, shift;
} kt_move;

typedef struct kt_records {
    uint16_t weights, bytes; /* of a record; 0 bytes: codes do not stand in records */
    uint8_t code_bits;       /* of codes in rows: 4 or 8 */
    uint8_t planes;
    uint8_t spares;
    kt_plane plane[KT_PLANES_MAX];
    kt_move spare[KT_SPARES_MAX]; /* bits that mean nothing, and must be 0 */
} kt_records;

/* Turn so many records into a row of codes, as packing takes it; and back, into the planes' bytes alone. */
void kt_records_to_rows(const kt_records *o, const uint8_t *from, size_t records, uint8_t *rows);
void kt_records_from_rows(const kt_records *o, const uint8_t *rows, size_t records, uint8_t *to);

/* Numbers that stand in each record, as an array of a whole matrix. */
typedef struct kt_field {
    uint16_t item_bytes; /* of all items of a record */
    uint8_t plus;        /* to each byte */
    uint8_t moves;
    kt_move move[KT_MOVES_MAX];
    uint8_t *items; /* [records][item_bytes] */
} kt_field;

typedef struct kt_fields {
    size_t count;
    kt_field field[KT_FIELDS_MAX];
} kt_fields;

/* Reads the fields of a rectangle's records into items. Returns whether a spare bit is set. */
bool kt_fields_read(const kt_records *o, const kt_fields *fields, const uint8_t *stored, kt_rectangle r);
/* The inverse: all bytes of records that no plane has. It changes the items. */
void kt_fields_write(const kt_records *o, const kt_fields *fields, uint8_t *stored, kt_rectangle r);

#endif
