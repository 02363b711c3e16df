# pack/: packed layouts.
from libc.stdint cimport uint8_t, uint16_t, uint32_t

from ktmoe._native.ktmoe cimport kt_grid
from ktmoe._native.python.driver.base cimport kt_bool


cdef extern from "pack/records.h" nogil:
    enum:
        KT_PLANES_MAX
        KT_MOVES_MAX
        KT_SPARES_MAX
        KT_RECORD_WEIGHTS_MAX
    ctypedef struct kt_plane:
        uint16_t offset, run
        uint8_t bits, shift
    ctypedef struct kt_move:
        uint16_t from_ "from"
        uint16_t to
        uint8_t count, first, bits, shift
    ctypedef struct kt_records:
        uint16_t weights, bytes
        uint8_t code_bits, planes, spares
        kt_plane plane[4]
        kt_move spare[16]
    ctypedef struct kt_field:
        uint16_t item_bytes
        uint8_t plus, moves
        kt_move move[64]
        uint8_t *items
    ctypedef struct kt_fields:
        size_t count
        kt_field field[4]


cdef extern from "pack/order.h" nogil:
    ctypedef struct kt_order:
        kt_bool moved, along_n, transposed
        uint8_t code_bytes
        uint8_t nibbles[8]
        kt_records records


cdef extern from "pack/pack.h" nogil:
    ctypedef struct kt_group_array:
        size_t group, rows, bytes
        uint32_t padding, magnitude, field
        kt_bool negated
        uint8_t bits, plus
    ctypedef struct kt_packing:
        const char *family
        size_t bits
        int version
    ctypedef struct kt_format:
        const kt_packing *packing
        kt_order order
        kt_group_array groups[4]
        uint8_t padding
        const kt_grid *grid
    ctypedef struct kt_scan:
        uint8_t low, high
        kt_bool negative, refused
    ctypedef struct kt_slice:
        size_t matrix, row, rows, column, columns
        uint8_t *codes
        uint8_t *groups[4]
        const kt_fields *fields
    const kt_packing *kt_packings[]
    size_t kt_codes_bytes(const kt_format *format, size_t columns)
    size_t kt_group_bytes(const kt_group_array *array, size_t columns)


cdef extern from "pack/groups.h" nogil:
    size_t kt_panel_bytes(const kt_format *format, size_t k)
