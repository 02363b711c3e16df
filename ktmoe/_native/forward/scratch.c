/* Scratch memory of the forward pass: where each array of a job is. */
#include "forward/arenas.h"
#include "forward/job.h"
#include "forward/tuning.h"

enum { D_PART = 4 }; /* d takes at most one in so many bytes */

static kt_arenas arenas;

kt_arenas *kt_forward_arenas(void) { return &arenas; }

size_t kt_moe_scratch_bytes(void) { return kt_arenas_bytes(&arenas); }

void kt_moe_release(void) { kt_arenas_release(&arenas); }

/* Gives every array that the caller or all shards touch its place for a batch of `tokens`; returns the bytes. */
static size_t lay_out(kt_job *j, uint8_t *base, size_t tokens) {
    const size_t slots = tokens * j->batch.top_k, num_experts = j->layer->num_experts;
    const size_t d_bytes = slots * j->hidden_panels * j->num_shards * sizeof(kt_panel_row);
    kt_carver c = {base, 0};
    size_t ranges;
    kt_schedule_plan(&j->schedule, tokens, j->batch.top_k, num_experts, d_bytes <= kt_moe_tuning.scratch_bytes / D_PART,
                     &ranges);
    const size_t pieces = slots < num_experts * ranges ? slots : num_experts * ranges;
    j->route.num_ranges = ranges;
    kt_route_carve(&j->route, &c, num_experts, tokens, j->batch.top_k, ranges);
    kt_schedule_carve(&j->schedule, &c, pieces, ranges, slots);
    for (kt_x_form *form = j->forms; form < j->forms + j->num_forms; form++) {
        form->x = kt_carve(&c, slots, sizeof *form->x);
        form->staged = kt_carve_beyond(&c, form->by_slot ? slots : tokens, form->stride_bytes,
                                       form->rows->tiled ? KT_TILE_ROWS * form->rows->block_bytes : 0);
    }
    j->row = kt_carve(&c, j->k_hidden, sizeof *j->row);
    j->together = kt_carve(&c, slots, sizeof *j->together);
    j->summed = kt_carve(&c, ranges * j->hidden_panels, sizeof *j->summed);
    for (size_t p = 0; j->batch.adapter && p < KT_MATRICES; p++)
        j->t[p] = kt_carve(&c, slots * j->batch.adapter->rank, sizeof(float));
    for (kt_shard_job *p = j->shards; p < j->shards + j->num_shards; p++) { /* what the caller fills */
        p->h_rows = kt_carve(&c, slots, sizeof *p->h_rows);
        p->gates = kt_carve(&c, pieces, sizeof *p->gates);
        p->met = kt_carve(&c, j->schedule.may_halve ? pieces * p->inter_panels : 0, sizeof *p->met);
        p->arrived = kt_carve(&c, j->hidden_panels, sizeof *p->arrived);
        p->workers = kt_carve(&c, p->team->size, sizeof *p->workers);
    }
    return c.used;
}

/* Numbers of the longest row that an adapter's A takes: any worker takes those of h, of all shards. */
static size_t longest_row(const kt_job *j) {
    size_t most = j->layer->hidden;
    for (const kt_shard_job *p = j->shards; p < j->shards + j->num_shards; p++)
        if (p->shard->intermediate > most) most = p->shard->intermediate;
    return most;
}

/* Gives every array that only one shard's threads touch its place; returns the bytes. lay_out() comes before. */
static size_t lay_out_shard(const kt_job *j, kt_shard_job *p, uint8_t *base, size_t tokens) {
    const kt_layer *l = j->layer;
    const kt_schedule *s = &j->schedule;
    const size_t slots = tokens * j->batch.top_k, threads = p->team->size, ranges = j->route.num_ranges;
    const kt_adapter *adapter = j->batch.adapter;
    const size_t adapted = adapter ? KT_ROWS_MAX : 0, kept = j->batch.kept.g ? KT_ROWS_MAX : 0;
    const size_t slab_rows = s->by_panel && j->num_shards == 1 ? (tokens + ranges - 1) / ranges : 0;
    kt_carver c = {base, 0};
    p->h = kt_carve_beyond(&c, slots, p->h_stride_bytes, KT_TILE_ROWS * l->h_block_bytes);
    p->halves = kt_carve(&c, s->may_halve ? 2 * p->inter_panels * slots : 0, sizeof(kt_panel_row));
    p->d = kt_carve(&c, s->by_panel ? 0 : slots * j->hidden_panels, sizeof(kt_panel_row));
    p->sums = kt_carve(&c, j->num_shards > 1 ? j->hidden_panels * tokens : 0, sizeof(kt_panel_row));
    const bool h_kept = adapter && adapter->of[KT_OF_DOWN].a.data;
    p->bf16_h = h_kept ? kt_carve(&c, slots * p->shard->intermediate, sizeof *p->bf16_h) : NULL;
    for (size_t i = 0; i < threads; i++) {
        const kt_worker_scratch w = {
            .g = kt_carve(&c, KT_ROWS_MAX, sizeof(kt_panel_row)),
            .u = kt_carve(&c, KT_ROWS_MAX, sizeof(kt_panel_row)),
            .slab = kt_carve(&c, p->lists->slab_panels * slab_rows, sizeof(kt_panel_row)),
            .h = kt_carve(&c, KT_ROWS_MAX, sizeof(kt_panel_h)),
            .row = kt_carve(&c, j->k_hidden, sizeof(uint16_t)),
            .kernel = kt_carve(&c, l->kernel_scratch_bytes, 1),
            .added = {kt_carve(&c, adapted, sizeof(kt_panel_row)), kt_carve(&c, adapted, sizeof(kt_panel_row))},
            .wide = kt_carve(&c, adapter ? KT_TILE_ROWS * longest_row(j) : 0, sizeof(float)),
            .low = kt_carve(&c, adapter ? adapter->rank * KT_LOWERED_INPUTS : 0, sizeof(float)),
            .kept = {kt_carve(&c, kept, sizeof(kt_panel_row)), kt_carve(&c, kept, sizeof(kt_panel_row))},
        };
        if (base) p->workers[i] = w;
    }
    return c.used;
}

static size_t need(kt_job *j, size_t tokens) {
    size_t bytes = lay_out(j, NULL, tokens);
    for (kt_shard_job *p = j->shards; p < j->shards + j->num_shards; p++) bytes += lay_out_shard(j, p, NULL, tokens);
    return bytes;
}

size_t kt_scratch_chunk(kt_job *j) {
    size_t most = j->batch.tokens;
    while (need(j, most) > kt_moe_tuning.scratch_bytes && most > 1) most = (most + 1) / 2;
    return most;
}

bool kt_scratch_have(kt_job *j, size_t tokens) {
    kt_arena_sizes sizes = {
        .placement = j->layer->placement, .bound = kt_moe_tuning.scratch_bytes, .common = lay_out(j, NULL, tokens)};
    for (size_t i = 0; i < j->num_shards; i++) sizes.of[i] = lay_out_shard(j, &j->shards[i], NULL, tokens);
    if (!kt_arenas_have(&arenas, &sizes)) return false;
    lay_out(j, arenas.common.base, tokens);
    for (size_t i = 0; i < j->num_shards; i++) lay_out_shard(j, &j->shards[i], arenas.of[i].base, tokens);
    return true;
}
