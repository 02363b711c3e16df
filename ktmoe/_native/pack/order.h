/* Where a checkpoint has the code of (n, k); ktmoe/weights/order.py says what the fields mean. */
#ifndef KT_ORDER_H
#define KT_ORDER_H

#include "pack/records.h"

/* moved: codes do not stand as rows. All zero, they do, whatever their size. */
typedef struct kt_order {
    bool moved, along_n, transposed;
    uint8_t code_bytes; /* of codes of 8, 16 or 32 bits, which stand k after k; 0: 4-bit codes, eight in a dword */
    uint8_t nibbles[8];
    kt_records records; /* that codes stand in, if it has bytes */
} kt_order;

/* A rectangle's codes as rows, row_bytes from one to the next, and back. */
void kt_order_to_rows(const kt_order *order, const uint8_t *stored, kt_rectangle r, uint8_t *rows, size_t row_bytes);
void kt_order_from_rows(const kt_order *order, const uint8_t *rows, size_t row_bytes, kt_rectangle r, uint8_t *stored);

/* Rows of numbers of 1, 2 or 4 bytes to columns, which are to_row bytes apart. */
void kt_transpose(const uint8_t *from, size_t from_row, size_t rows, size_t columns, uint8_t *to, size_t to_row, size_t bytes);

#endif
