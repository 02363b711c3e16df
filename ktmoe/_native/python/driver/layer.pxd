# layer/: packed experts; and the kernel tables of this build.
from libc.stdint cimport int64_t, uint8_t, uint64_t

from ktmoe._native.ktmoe cimport kt_activation, kt_codebook, kt_isa, kt_kernel
from ktmoe._native.python.driver.base cimport kt_bool, kt_file_state, kt_placement
from ktmoe._native.python.driver.pack cimport kt_fields, kt_format, kt_scan, kt_slice
from ktmoe._native.python.driver.quantize cimport kt_block_rule


cdef extern from "kernels/isas.h" nogil:
    const kt_isa *kt_isas[]


cdef extern from "layer/layer.h" nogil:
    ctypedef struct kt_matrix:
        const uint8_t *data
        size_t panel_bytes
        const kt_kernel *kernel
    enum kt_router_weight:
        KT_DOWN_OUTPUT
        KT_DOWN_INPUT
        KT_EXPERT_INPUT
    enum:
        KT_X_FORMS
    ctypedef struct kt_shard:
        size_t intermediate
    ctypedef struct kt_layer:
        size_t num_experts, hidden
        const kt_placement *placement
        kt_shard *shards
        kt_activation act
        const kt_isa *isa
        kt_router_weight router_weight
        const kt_block_rule *round_x
        const kt_block_rule *round_h


cdef extern from "layer/adapter.h" nogil:
    ctypedef struct kt_low_rank:
        const void *data
        kt_bool bf16
    ctypedef struct kt_lora:
        kt_low_rank a, b
    ctypedef struct kt_adapter:
        size_t rank
        float scale
        kt_lora of[3]


cdef extern from "layer/experts.h" nogil:
    ctypedef struct kt_shard_memory:
        size_t first, count, expert_bytes
        uint8_t *arena
        size_t arena_bytes
    ctypedef struct kt_experts:
        kt_layer layer
        size_t intermediate, matrices
        kt_format formats[3]
        kt_codebook codebooks[3]
        kt_shard_memory *memory
        kt_scan *scans
        kt_bool mapped
        size_t missing
    ctypedef struct kt_arena_file:
        int fd
        kt_file_state state
        uint64_t offsets[32]
    ctypedef struct kt_given:
        const uint8_t *codes
        const uint8_t *groups[4]
        const kt_fields *fields
        const float *bias
        const float *factor
        kt_bool factor_per_row, divides
        const kt_kernel *kernels[2]
        uint8_t low, high
        kt_bool negative
    ctypedef struct kt_numbers:
        float *bias
        float *factor
        kt_bool has_bias
    ctypedef struct kt_read_rows:
        const int64_t *numbers
        size_t count
        uint8_t *codes
        uint8_t *groups[4]
        float *factors
    enum kt_outcome:
        KT_DONE
        KT_CLOSED
        KT_INCOMPLETE
        KT_REFUSED
        KT_TOO_MANY_FORMS
        KT_FAILED
        KT_FILE_CHANGED
    enum:
        KT_FILE_DIFFERS
    size_t kt_expert_bytes(const kt_format *formats, size_t matrices, size_t hidden, kt_shard_memory *m)
    bint kt_experts_map(kt_experts *e, const size_t (*columns)[2])
    int kt_experts_map_file(kt_experts *e, const size_t (*columns)[2], const kt_arena_file *file)
    bint kt_experts_intact(const kt_experts *e)
    void kt_experts_free(kt_experts *e)
    kt_outcome kt_experts_install(kt_experts *e, size_t expert, const kt_given *given, kt_scan *scans, int *error)
    void kt_experts_numbers(const kt_experts *e, size_t expert, kt_numbers *numbers)
    kt_outcome kt_experts_pack(kt_experts *e, size_t expert, const kt_given *given, kt_scan *scans, int *error)
    kt_outcome kt_experts_unpack(const kt_experts *e, size_t expert, const kt_slice *slices, size_t count, kt_numbers *numbers,
                                 int *error)
    kt_outcome kt_experts_read_rows(const kt_experts *e, const kt_read_rows *to, int *error)
    kt_matrix *kt_matrix_of(const kt_experts *e, size_t shard, size_t expert, size_t matrix)
