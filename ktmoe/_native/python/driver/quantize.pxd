# quantize/: rounding of weights and of blocks of activations.
from libc.stdint cimport uint8_t, uint16_t

from ktmoe._native.python.driver.base cimport kt_bool


cdef extern from "quantize/blocks.h" nogil:
    enum:
        KT_E2M1_TIES
    ctypedef struct kt_block_rule:
        kt_bool e2m1
        uint8_t up, down, zeros
        kt_bool negative_zero
        kt_bool up_at[7]
    void kt_blocks_quantize(const kt_block_rule *rule, const uint16_t *x, size_t count, uint8_t *codes, uint8_t *scales)
    void kt_blocks_values(kt_bool e2m1, const float *values, const uint8_t *codes, const uint8_t *scales, size_t count, uint16_t *x)


cdef extern from "quantize/weights.h" nogil:
    ctypedef enum kt_source:
        KT_SOURCE_BF16
        KT_SOURCE_FP16
        KT_SOURCE_FP32
        KT_SOURCE_BYTES
        KT_SOURCE_NIBBLES
    ctypedef struct kt_weights:
        kt_source stored
        size_t n, k
        const uint8_t *codes
        const float *values
        const float *scales
        const float *points
        const float *factors
        size_t rows, columns, point_columns
        kt_bool per_row, divides


cdef extern from "quantize/round.h" nogil:
    enum:
        KT_E2M1_LIMITS
    ctypedef enum kt_rounds_to:
        KT_TO_INTEGERS
        KT_TO_E2M1
        KT_TO_E4M3
    ctypedef enum kt_ties:
        KT_TIES_EVEN
        KT_TIES_AWAY
        KT_TIES_ZERO
    ctypedef struct kt_rounding:
        kt_rounds_to to
        kt_ties ties
        kt_bool sixteenths, float64, negative_zero, zero_signed
        size_t rows, columns
        const float *multipliers
        const float *divisors
        const float *points
        const double *values
        float least, most
        unsigned code_bits, plus
        float limits[7]
    bint kt_weight_extremes(const kt_weights *m, size_t rows, size_t columns, float *low, float *high)
    void kt_round_weights(const kt_weights *m, const kt_rounding *how, size_t row, size_t count, uint8_t *codes, double *sums)
