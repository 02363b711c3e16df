# What native backends cimport: the types of ktmoe.h.
from libc.stdint cimport int8_t, uint8_t, uint16_t, uint32_t, int32_t


cdef extern from "ktmoe.h":
    enum:
        KT_ABI_VERSION
        KT_PANEL
        KT_BLOCK
        KT_SCALE_GROUP_MIN
        KT_SCALE_GROUP_MAX
        KT_SUPER_GROUP
        KT_TILE_ROWS
        KT_ROWS_MAX
        KT_GRID_INDICES
        KT_GRID_SCALES
        KT_GRID_COUNT_MAX

    ctypedef struct kt_bits:
        uint32_t byte, rotate, mask

    ctypedef struct kt_byte:
        kt_bits of[2]

    ctypedef struct kt_grid:
        size_t record_bytes
        size_t weights
        size_t count
        const uint16_t *entries
        int sign_bits
        int scales
        kt_byte index[2][64]
        kt_byte sign[32]
        kt_byte scale[16]
        kt_byte super[2]

    ctypedef struct kt_codebook:
        uint16_t plain[64]
        uint16_t folded[32]
        uint16_t signed5[32]
        float value[16]
        int8_t whole[16]
        float unit
        int32_t zero
        const kt_grid *grid

    ctypedef struct kt_rows:
        const char *form
        size_t block_bytes
        int tiled
        void (*encode)(const uint16_t *x, size_t first, size_t count, size_t k, void *row) nogil
        void (*encode_e2m1)(const uint16_t *x, size_t first, size_t count, size_t k, void *row) nogil

    ctypedef struct kt_dot:
        const void **x
        size_t m
        size_t k
        const uint8_t *w[2]
        size_t panels
        size_t scale_group
        const kt_codebook *codebook
        const uint8_t *next[2]
        size_t next_bytes
        float *out[2]
        int add
        void *scratch

    ctypedef struct kt_transposing:
        const uint8_t *w
        size_t k
        size_t first
        size_t scale_group
        const kt_codebook *codebook
        void *to[2]

    ctypedef struct kt_kernel:
        const char *family
        int bits
        const char *element
        const char *scale
        size_t scale_group_min
        size_t scale_group_max
        const char *super_scale
        const char *offset
        const kt_rows *rows
        int folded
        int whole
        const char *tuned_for
        size_t few_max
        size_t scratch_bytes
        void (*few)(const kt_dot *) nogil
        void (*many)(const kt_dot *) nogil
        const char *operand
        int terms
        void (*transpose)(const kt_transposing *) nogil

    ctypedef struct kt_activation:
        float alpha, limit, up_offset

    ctypedef struct kt_finish:
        const float *factor
        int divides
        const float *bias
        const float *added

    ctypedef struct kt_activate:
        const float *g
        const float *u
        kt_finish finish_g
        kt_finish finish_u
        const float *r
        size_t m, columns
        kt_activation act
        uint16_t *h
        size_t h_stride
        float *kept_g
        float *kept_u
        size_t kept_stride

    ctypedef struct kt_derive:
        const float *g
        const float *u
        const float *dh
        size_t stride
        const float *r
        int by_input
        size_t m, columns
        kt_activation act
        uint16_t *dg
        uint16_t *du
        uint16_t *h
        size_t to_stride
        float *dr

    ctypedef struct kt_dense:
        const float *a
        const float *b
        size_t a_row, a_k, b_row
        float *c
        size_t c_row
        size_t m, n, k
        int add

    ctypedef struct kt_dense_rows:
        const float *a
        const float *b
        size_t a_row, b_row
        float *c
        size_t c_row
        size_t m, n, k
        int add

    ctypedef struct kt_isa:
        uint32_t abi_version
        const char *name
        const kt_kernel *const *kernels
        void (*enter)() nogil
        void (*leave)() nogil
        void (*activate)(const kt_activate *) nogil
        void (*derive)(const kt_derive *) nogil
        void (*dense)(const kt_dense *) nogil
        void (*dense_rows)(const kt_dense_rows *) nogil
        void (*widen)(const uint16_t *, float *, size_t) nogil
        void (*exp)(const float *, float *, size_t) nogil
        void (*read)(const void *, size_t, size_t) nogil
        double (*peak)(size_t) nogil
