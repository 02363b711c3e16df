# The driver's own interfaces (driver.h); for core.pyx alone.
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from ktmoe._native.core cimport kt_activation, kt_codebook, kt_isa, kt_kernel


cdef extern from "driver.h" nogil:
    ctypedef struct kt_cpu_feature:
        const char *name
        bint present
    const kt_cpu_feature *kt_cpu_features(size_t *count)

    void *kt_os_map(size_t bytes)
    void kt_os_unmap(void *p, size_t bytes)
    int kt_os_permit_tiles()

    ctypedef struct kt_cpus:
        uint64_t words[64]
    enum:
        KT_CPU_WORDS
        KT_SHARDS_MAX
        KT_MATRICES
    ctypedef struct kt_placement:
        size_t shards, threads, num_cpus
        kt_cpus *cpus

    bint kt_os_process_cpus(kt_cpus *cpus)

    void kt_pool_lock()
    void kt_pool_unlock()
    void kt_pool_configure(size_t threads, bint chosen, uint64_t spin_ns)
    size_t kt_pool_threads()
    void kt_pool_stop()

    ctypedef struct kt_format
    ctypedef struct kt_packing:
        size_t code_bits
        size_t (*panel_bytes)(const kt_format *format, size_t k) noexcept nogil
    ctypedef struct kt_format:
        const kt_packing *packing
        size_t group
        size_t scale_bytes
        uint16_t scale_one
        uint8_t zero_code
    ctypedef struct kt_source:
        const kt_format *format
        const uint8_t *codes
        const uint8_t *scales
        size_t n, k, codes_stride_bytes, scales_stride_bytes
    ctypedef struct kt_scan:
        uint8_t low, high
        bint refused
    ctypedef struct kt_share:
        const kt_format *format
        uint8_t *packed
        kt_source source
        size_t row, column, n, k
    ctypedef struct kt_piece:
        size_t matrix, row, rows, column, columns
        uint8_t *codes
        uint8_t *scales
    const kt_packing *kt_packing_of(const char *family)
    int kt_pack(const kt_placement *where, const kt_share *shares, kt_scan *scans)
    int kt_unpack(const kt_placement *where, const kt_share *shares, const kt_piece *pieces, size_t count)

    ctypedef struct kt_matrix:
        const uint8_t *data
        size_t panel_bytes
        size_t group
        const kt_kernel *kernel
        const kt_codebook *codebook
        const float *bias
    ctypedef struct kt_expert:
        kt_matrix gate, up, down
    enum kt_router_weight:
        KT_DOWN_OUTPUT
        KT_DOWN_INPUT
        KT_EXPERT_INPUT
    enum kt_dtype:
        KT_BF16
        KT_F32
    enum:
        KT_X_KINDS
    ctypedef struct kt_shard:
        size_t intermediate
        kt_expert *experts
    ctypedef struct kt_layer:
        size_t num_experts, hidden
        const kt_placement *where
        kt_shard *shards
        kt_activation act
        const kt_isa *isa
        kt_router_weight router_weight
    ctypedef struct kt_batch:
        size_t tokens, top_k
        const void *x
        kt_dtype dtype
        const int64_t *ids
        const float *weights
        const uint8_t *mask
        void *y
    ctypedef struct kt_tuning:
        size_t scratch_bytes
        size_t reduce_slots
        uint32_t uneven
        bint only_many
    kt_tuning kt_moe_tuning
    bint kt_moe_use(kt_layer *layer, kt_matrix *matrix, bint down, const kt_kernel *kernel)
    int kt_moe_forward(const kt_layer *layer, const kt_batch *batch)
    size_t kt_moe_scratch_bytes()
    void kt_moe_release()

    double kt_limit_read(void (*read)(const void *, size_t) nogil, const kt_placement *where, const uint8_t *const *p,
                         const size_t *nbytes)
    double kt_limit_peak(double (*peak)(size_t) nogil, size_t iterations, double *flops)
    double kt_latency_wake(uint64_t idle_ns)
    double kt_latency_barrier(size_t count)
    double kt_latency_handoff(size_t count)
