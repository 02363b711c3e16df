# What only the probes take of the driver.
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from ktmoe._native.ktmoe cimport kt_kernel
from ktmoe._native.python.driver.base cimport kt_bool, kt_placement
from ktmoe._native.python.driver.layer cimport kt_layer, kt_matrix
from ktmoe._native.python.driver.passes cimport kt_batch
from ktmoe._native.python.driver.quantize cimport kt_block_rule


cdef extern from "base/os.h" nogil:
    void *kt_os_map(size_t nbytes)
    void kt_os_unmap(void *p, size_t nbytes)


cdef extern from "base/limits.h" nogil:
    double kt_latency_wake(uint64_t idle_ns)
    double kt_latency_gate(size_t count)
    double kt_latency_handoff(size_t count)


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


cdef extern from "quantize/blocks.h" nogil:
    void kt_blocks_round(const kt_block_rule *rule, uint16_t *x, size_t count)


cdef extern from "layer/layer.h" nogil:
    bint kt_layer_use(kt_layer *layer, kt_matrix *matrix, kt_bool down, const kt_kernel *kernel)


cdef extern from "forward/arenas.h" nogil:
    ctypedef struct kt_arena:
        uint8_t *base
        size_t bytes
    ctypedef struct kt_arenas:
        kt_arena of[32]
    kt_arenas *kt_forward_arenas()


cdef extern from "forward/forward.h" nogil:
    size_t kt_moe_scratch_bytes()


cdef extern from "backward/backward.h" nogil:
    kt_arenas *kt_backward_arenas()
    size_t kt_backward_scratch_bytes()


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


cdef extern from "forward/staging.h" nogil:
    ctypedef struct kt_staging:
        size_t rows


cdef extern from "forward/job.h" nogil:
    ctypedef struct kt_shard_job:
        size_t k_inter
    ctypedef struct kt_job:
        kt_batch batch
        kt_route route
        kt_schedule schedule
        size_t k_hidden
        kt_staging staging
        kt_shard_job shards[32]
    void kt_job_begin(kt_job *j, const kt_layer *layer, const kt_batch *batch, const kt_teams *teams)
    size_t kt_job_stages(kt_job *j, const kt_bool *used)
    size_t kt_scratch_chunk(kt_job *j)


cdef extern from "forward/calls.h" nogil:
    size_t kt_call_rows(size_t left)
