# The driver's own interfaces; for core.pyx alone.
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from ktmoe._native.ktmoe cimport kt_activation, kt_codebook, kt_isa, kt_kernel


cdef extern from "stdbool.h":
    ctypedef bint kt_bool "bool"


cdef extern from "base/cpu.h" nogil:
    ctypedef struct kt_cpu_feature:
        const char *name
        bint present
    const kt_cpu_feature *kt_cpu_features(size_t *count)
    unsigned kt_fp_enter()
    void kt_fp_leave(unsigned state)


cdef extern from "base/os.h" nogil:
    enum:
        KT_CPU_WORDS
    ctypedef struct kt_cpus:
        uint64_t words[64]
    bint kt_os_process_cpus(kt_cpus *cpus)
    ctypedef struct kt_file_state:
        uint64_t bytes, seconds, nanoseconds
    bint kt_os_file_state(int fd, kt_file_state *state)
    int kt_os_hold(int fd)
    void kt_os_let_go(int fd)
    enum:
        KT_PAGE_BYTES
        KT_HUGE_BYTES
    void *kt_os_map(size_t nbytes)
    void kt_os_unmap(void *p, size_t nbytes)
    int kt_os_permit_tiles()


cdef extern from "base/placement.h" nogil:
    enum:
        KT_SHARDS_MAX
    ctypedef struct kt_domain:
        size_t shard, cores
        kt_cpus cpus, one_a_core
    ctypedef struct kt_placement:
        size_t shards, threads, num_cpus, num_domains
        kt_domain *domains


cdef extern from "base/teams.h" nogil:
    ctypedef struct kt_group:
        size_t shard, first, size
    ctypedef struct kt_team:
        size_t first, size, first_group, num_groups
    ctypedef struct kt_teams:
        size_t workers, shards, num_groups
        kt_team of[32]
        kt_group *groups
    ctypedef struct kt_worker:
        size_t index, group
        const kt_teams *teams
    bint kt_serves(const kt_worker *me, size_t shard)
    int kt_teams_make(kt_teams *teams, const kt_placement *placement, size_t threads)
    void kt_teams_free(kt_teams *teams)


cdef extern from "base/pool.h" nogil:
    void kt_pool_lock()
    void kt_pool_unlock()
    void kt_pool_configure(size_t threads, bint chosen, uint64_t spin_ns, const kt_placement *everywhere)
    size_t kt_pool_threads()
    void kt_pool_stop()


cdef extern from "base/limits.h" nogil:
    double kt_limit_read(void (*read)(const void *, size_t, size_t) nogil, size_t streams, const kt_placement *placement,
                         const uint8_t *const *p, const size_t *nbytes)
    double kt_limit_peak(double (*peak)(size_t) nogil, size_t iterations, double *flops)
    double kt_latency_wake(uint64_t idle_ns)
    double kt_latency_gate(size_t count)
    double kt_latency_handoff(size_t count)


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
        uint8_t code_bits, plus, planes, spares
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
    enum:
        KT_SCALES
        KT_SUPER_SCALES
        KT_OFFSETS
        KT_SUPER_OFFSETS
        KT_GROUP_ARRAYS
    ctypedef struct kt_group_array:
        size_t group, rows, bytes
        uint32_t padding, magnitude, field
        kt_bool negated
    ctypedef struct kt_packing:
        const char *family
        int version
    ctypedef struct kt_format:
        const kt_packing *packing
        kt_order order
        kt_group_array groups[4]
        uint8_t padding
    ctypedef struct kt_scan:
        uint8_t low, high
        kt_bool negative, refused
    ctypedef struct kt_slice:
        size_t matrix, row, rows, column, columns
        uint8_t *codes
        uint8_t *groups[4]
        const kt_fields *fields
    const kt_packing *kt_packings[]


cdef extern from "pack/groups.h" nogil:
    size_t kt_panel_bytes(const kt_format *format, size_t k)


cdef extern from "quantize/blocks.h" nogil:
    enum:
        KT_E2M1_TIES
    ctypedef struct kt_block_rule:
        kt_bool e2m1
        uint8_t up, down, zeros
        kt_bool negative_zero
        kt_bool up_at[7]
    void kt_blocks_round(const kt_block_rule *rule, uint16_t *x, size_t count)
    void kt_blocks_quantize(const kt_block_rule *rule, const uint16_t *x, size_t count, uint8_t *codes, uint8_t *scales)
    void kt_blocks_values(kt_bool e2m1, const float *values, const uint8_t *codes, const uint8_t *scales, size_t count, uint16_t *x)


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
    bint kt_layer_use(kt_layer *layer, kt_matrix *matrix, kt_bool down, const kt_kernel *kernel)


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


cdef extern from "kernels/isas.h" nogil:
    const kt_isa *kt_isas[]


cdef extern from "layer/experts.h" nogil:
    ctypedef struct kt_shard_memory:
        size_t first, count, expert_bytes
        uint8_t *arena
        size_t arena_bytes
    ctypedef struct kt_experts:
        kt_layer layer
        size_t intermediate
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
    size_t kt_expert_bytes(const kt_format *formats, size_t hidden, kt_shard_memory *m)
    bint kt_experts_map(kt_experts *e, const size_t (*columns)[2])
    int kt_experts_map_file(kt_experts *e, const size_t (*columns)[2], const kt_arena_file *file)
    bint kt_experts_intact(const kt_experts *e)
    void kt_experts_free(kt_experts *e)
    kt_outcome kt_experts_install(kt_experts *e, size_t expert, const kt_given *given, kt_scan *scans, int *error)
    void kt_experts_numbers(const kt_experts *e, size_t expert, kt_numbers *numbers)
    kt_outcome kt_experts_pack(kt_experts *e, size_t expert, const kt_given *given, kt_scan *scans, int *error)
    kt_outcome kt_experts_unpack(const kt_experts *e, size_t expert, const kt_slice *slices, size_t count, kt_numbers *numbers,
                                 int *error)
    kt_matrix *kt_matrix_of(const kt_experts *e, size_t shard, size_t expert, size_t matrix)


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
        kt_bool x_rounded
        kt_stages stages
        const uint32_t *rows
        uint16_t *h
        size_t h_columns
        const kt_adapter *adapter
        kt_kept kept
    int kt_moe_forward(const kt_layer *layer, const kt_batch *batch)
    size_t kt_moe_scratch_bytes()
    void kt_moe_release()


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
    size_t kt_backward_scratch_bytes()
    void kt_backward_release()
    const kt_kernel *kt_product_for(const kt_isa *isa, const char *family)


cdef extern from "forward/carve.h" nogil:
    ctypedef struct kt_carver:
        uint8_t *base
        size_t used


cdef extern from "forward/route.h" nogil:
    ctypedef struct kt_piece:
        size_t expert, first, count
    ctypedef struct kt_route_range:
        size_t first, end, first_piece, num_pieces
    ctypedef struct kt_route:
        size_t num_ranges, num_pieces, num_slots
        kt_route_range *ranges
        kt_piece *pieces
        uint8_t *active
    void kt_route_carve(kt_route *r, kt_carver *c, size_t num_experts, size_t tokens, size_t top_k, size_t ranges)
    void kt_route_fill(kt_route *r, const kt_batch *batch, size_t num_experts, size_t ranges)


cdef extern from "forward/schedule.h" nogil:
    enum kt_phase:
        KT_PHASE_A
        KT_PHASE_B
        KT_PHASES
    ctypedef struct kt_strip:
        uint32_t piece, first, rows
    ctypedef struct kt_list:
        size_t per_strip
    ctypedef struct kt_shard_lists:
        kt_bool halves
        kt_list of[2]
    ctypedef struct kt_schedule:
        kt_bool by_panel
        size_t num_strips
        kt_strip *strips
        kt_shard_lists shards[32]
    ctypedef struct kt_hand:
        pass
    void kt_schedule_carve(kt_schedule *s, kt_carver *c, size_t pieces, size_t ranges, size_t slots)
    void kt_schedule_fill(kt_schedule *s, const kt_route *r)
    kt_hand kt_hand_of(const kt_list *list, const kt_worker *me)
    ctypedef struct kt_run:
        size_t first, end
    kt_run kt_list_take(const kt_list *list, kt_hand *hand)
    size_t kt_items_together(const kt_schedule *s, size_t shard, kt_phase phase, size_t item, size_t end)
    size_t kt_list_items(const kt_list *list)
    size_t kt_list_rounds_left(const kt_list *list, const kt_hand *hand)


cdef extern from "forward/job.h" nogil:
    ctypedef struct kt_shard_job:
        size_t k_inter
    ctypedef struct kt_job:
        kt_batch batch
        kt_route route
        kt_schedule schedule
        size_t k_hidden
        size_t rows_to_stage
        kt_shard_job shards[32]
    void kt_job_begin(kt_job *j, const kt_layer *layer, const kt_batch *batch, const kt_teams *teams)
    size_t kt_job_stages(kt_job *j, const kt_bool *used)
    size_t kt_scratch_chunk(kt_job *j)
    size_t kt_call_rows(size_t left)


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


cdef extern from "captured/record.h" nogil:
    ctypedef struct kt_record_scratch:
        int64_t *ids
        int64_t *now
        int64_t *later
        uint8_t *on_gpu
        uint8_t *urgent
        float *x
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
