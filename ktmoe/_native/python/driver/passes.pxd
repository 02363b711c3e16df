# forward/, backward/ and captured/: what is computed with packed experts.
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t

from ktmoe._native.ktmoe cimport kt_isa, kt_kernel
from ktmoe._native.python.driver.base cimport kt_bool
from ktmoe._native.python.driver.layer cimport kt_adapter, kt_experts, kt_layer, kt_outcome


cdef extern from "forward/tuning.h" nogil:
    ctypedef struct kt_tuning:
        size_t scratch_bytes
        size_t reduce_slots, ranges
        uint32_t halves
        uint32_t uneven
        bint only_many, by_turns
    kt_tuning kt_moe_tuning


cdef extern from "forward/forward.h" nogil:
    enum kt_dtype:
        KT_BF16
        KT_F32
    enum kt_stages:
        KT_ALL_STAGES
        KT_GATE_UP
        KT_DOWN
    ctypedef struct kt_kept:
        float *g
        float *u
        float *t
    ctypedef struct kt_batch:
        size_t tokens, top_k
        const void *x
        kt_dtype dtype
        const int64_t *ids
        const float *weights
        const uint8_t *mask
        void *y
        kt_dtype y_dtype
        kt_bool x_rounded
        kt_stages stages
        const uint32_t *rows
        uint16_t *h
        size_t h_columns
        const kt_adapter *adapter
        kt_kept kept
    int kt_moe_forward(const kt_layer *layer, const kt_batch *batch)
    void kt_moe_release()


cdef extern from "forward/linear.h" nogil:
    enum:
        KT_LINEARS_MAX
    ctypedef struct kt_linear:
        const kt_layer *layer
        size_t column
        void *y
        size_t stride
    ctypedef struct kt_linears:
        size_t tokens
        const void *x
        size_t stride
        kt_dtype dtype, y_dtype
        size_t count
        kt_linear of[64]
    int kt_linear_forward(const kt_linears *call)


cdef extern from "backward/backward.h" nogil:
    ctypedef struct kt_lora_gradient:
        float *a
        float *b
    ctypedef struct kt_backward:
        kt_batch batch
        const void *grad_y
        kt_dtype grad_dtype
        void *grad_x
        float *grad_weights
        kt_lora_gradient of[3]
        kt_bool add
        float scale
    int kt_moe_backward(const kt_layer *layer, const kt_backward *backward)
    void kt_backward_release()


cdef extern from "backward/transposed.h" nogil:
    const kt_kernel *kt_product_for(const kt_isa *isa, const char *family)


cdef extern from "backward/linear.h" nogil:
    ctypedef struct kt_linear_gradient:
        const kt_layer *layer
        const void *grad_y
        void *grad_x
        size_t stride, x_stride
    ctypedef struct kt_linear_gradients:
        size_t tokens, inputs
        kt_dtype dtype, x_dtype
        kt_bool summed
        size_t count
        kt_linear_gradient of[64]
    int kt_linear_backward(const kt_linear_gradients *call)


cdef extern from "captured/record.h" nogil:
    ctypedef struct kt_record_scratch:
        int64_t *ids
        int64_t *now
        int64_t *later
        uint8_t *on_gpu
        uint8_t *urgent
        float *y
    ctypedef struct kt_record:
        const kt_experts *experts
        kt_batch batch
        const uint8_t *on_gpu
        size_t urgent_slots
        uint16_t *late
        kt_record *earlier
        kt_record_scratch scratch


cdef extern from "captured/queue.h" nogil:
    ctypedef struct kt_mark:
        uint32_t holders
    int kt_queue_start()
    void kt_queue_submit(void *record)
    void kt_queue_await(void *record)
    void kt_queue_close()
    bint kt_queue_idle(const kt_record *r)
    void kt_queue_forget(kt_record *r)
    size_t kt_queue_failures()
    kt_outcome kt_queue_take_outcome(kt_record *r, int *error)
    kt_mark *kt_mark_make()
    void kt_mark_hold(kt_mark *mark)
    void kt_mark_drop(void *mark)
