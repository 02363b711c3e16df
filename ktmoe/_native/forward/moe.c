/* One layer's forward pass: a batch in chunks that the scratch memory has room for, each routed, scheduled and then computed by the
 * pool's workers. */
#include <errno.h>
#include <string.h>

#include "base/cpu.h"
#include "base/pool.h"
#include "forward/job.h"

_Static_assert(sizeof(kt_job) <= 16 << 10, "on the caller's stack, which may be small, and cleared for each call");

static void ready(kt_job *j, kt_shard_job *p) {
    const kt_route *r = &j->route;
    const kt_schedule *s = &j->schedule;
    for (const kt_piece *own = r->pieces; own < r->pieces + r->num_pieces; own++) {
        const kt_rows *rows = p->shard->experts[own->expert].down.kernel->rows;
        for (size_t i = 0; i < own->count; i++) p->h_rows[own->first + i] = kt_row_of(rows, p->h, p->h_stride_bytes, own, i);
    }
    const size_t per_strip = p->lists->of[KT_PHASE_A].per_strip;
    for (size_t i = 0, strips; i < s->num_strips; i += strips) {
        for (strips = 1; i + strips < s->num_strips && s->strips[i + strips].piece == s->strips[i].piece;) strips++;
        kt_gate_close(&p->gates[s->strips[i].piece], (uint32_t)(strips * per_strip));
    }
    memset(p->arrived, 0, j->hidden_panels * sizeof *p->arrived);
    if (p->lists->halves) memset((void *)p->met, 0, s->num_strips * p->inter_panels);
}

size_t kt_job_stages(kt_job *j, const bool *used) {
    size_t rows = 0;
    for (size_t i = 0; i < j->num_forms; i++) {
        j->forms[i].stage = used[i] && kt_x_stages(&j->x, &j->forms[i]);
        rows += kt_x_rows(&j->x, &j->forms[i]);
    }
    kt_staging_begin(&j->staging, rows * j->k_hidden * sizeof(uint16_t) > KT_STAGE_ALONE_BYTES ? rows : 0);
    return rows;
}

static void point_x(kt_job *j) {
    const kt_route *r = &j->route;
    const bool needed = j->batch.stages != KT_DOWN;
    bool used[KT_X_FORMS] = {false}; /* by an expert that has rows; all shards of a matrix have one kernel */
    for (const kt_piece *own = r->pieces; own < r->pieces + r->num_pieces; own++) {
        const kt_expert *e = &j->layer->shards[0].experts[own->expert];
        used[e->gate.x_form] = used[e->up.x_form] = needed;
        for (size_t i = 0; i < own->count; i++) {
            const size_t left = own->count - i / KT_TILE_ROWS * KT_TILE_ROWS;
            j->together[own->first + i] = left < KT_TILE_ROWS ? (uint8_t)left : KT_TILE_ROWS;
        }
    }
    const size_t rows = kt_job_stages(j, used);
    for (size_t i = 0; i < j->num_forms; i++)
        if (used[i]) kt_x_point(&j->x, &j->forms[i]);
    if (j->staging.rows || !rows) return;
    const unsigned state = kt_fp_enter();
    for (const kt_x_form *form = j->forms; form < j->forms + j->num_forms; form++)
        kt_x_stage(&j->x, form, 0, kt_x_rows(&j->x, form), j->row);
    kt_fp_leave(state);
}

static int chunk(kt_job *j) {
    kt_route *r = &j->route;
    kt_route_fill(r, &j->batch, j->layer->num_experts, r->num_ranges);
    j->x.together = j->together;
    if (!r->num_slots) {
        if (kt_sums(j)) memset(j->batch.y, 0, j->batch.tokens * j->layer->hidden * kt_number_bytes(j->batch.y_dtype));
        return 0;
    }
    kt_schedule_fill(&j->schedule, r);
    point_x(j);
    memset(j->summed, 0, r->num_ranges * j->hidden_panels * sizeof *j->summed);
    for (kt_shard_job *p = j->shards; p < j->shards + j->num_shards; p++) ready(j, p);
    for (kt_lowered *l = j->lowered; j->batch.adapter && l < j->lowered + KT_PHASES; l++) {
        l->next.value = 0;
        kt_gate_close(&l->left, (uint32_t)j->schedule.num_strips);
    }
    kt_gate_close(&j->begun, (uint32_t)j->schedule.teams->workers);
    return kt_pool_run(kt_phases, j, j->layer->placement);
}

void kt_job_begin(kt_job *j, const kt_layer *l, const kt_batch *batch, const kt_teams *teams) {
    *j = (kt_job){
        .layer = l,
        .batch = *batch,
        .k_hidden = kt_round_up(l->hidden, KT_BLOCK),
        .hidden_panels = kt_round_up(l->hidden, KT_PANEL) / KT_PANEL,
        .num_shards = kt_shards_of(l->placement),
    };
    j->x = (kt_x){.layer = l, .batch = &j->batch, .route = &j->route, .k = j->k_hidden};
    j->schedule.teams = teams;
    j->schedule.hidden_panels = j->hidden_panels;
    for (; j->num_forms < KT_X_FORMS && l->x_rows[j->num_forms]; j->num_forms++) {
        const kt_rows *rows = l->x_rows[j->num_forms];
        j->forms[j->num_forms] = (kt_x_form){
            .rows = rows,
            .by_slot = rows->tiled || l->router_weight == KT_EXPERT_INPUT,
            .stride_bytes = kt_row_bytes(rows->block_bytes, j->k_hidden),
        };
    }
    for (size_t i = 0; i < j->num_shards; i++) {
        kt_shard_job *p = &j->shards[i];
        p->shard = &l->shards[i];
        p->team = &teams->of[i];
        j->intermediate += p->shard->intermediate;
        p->lists = &j->schedule.shards[i];
        p->k_inter = kt_round_up(p->shard->intermediate, KT_BLOCK);
        p->inter_panels = kt_round_up(p->shard->intermediate, KT_PANEL) / KT_PANEL;
        j->schedule.shards[i].inter_panels = p->inter_panels;
        p->h_stride_bytes = kt_row_bytes(l->h_block_bytes, p->inter_panels * KT_PANEL); /* whole panels are written */
    }
}

/* Where the kept arrays begin for a pair. */
static kt_kept kept_from(const kt_job *j, const kt_kept *all, size_t pair) {
    kt_kept k = *all;
    if (k.g) k.g += pair * j->intermediate, k.u += pair * j->intermediate;
    if (k.t) k.t += pair * KT_MATRICES * j->batch.adapter->rank;
    return k;
}

int kt_moe_forward(const kt_layer *l, const kt_batch *batch) {
    const kt_teams *teams = kt_pool_teams(l->placement);
    if (!teams) return ENOMEM;
    kt_job j;
    kt_job_begin(&j, l, batch, teams);
    const size_t most = kt_scratch_chunk(&j);
    if (!kt_scratch_have(&j, most)) return ENOMEM;
    memcpy(j.route.active, batch->mask, l->num_experts); /* once: its owner may change it while we run */

    const size_t x_bytes = l->hidden * kt_number_bytes(batch->dtype), y_bytes = l->hidden * kt_number_bytes(batch->y_dtype);
    for (size_t t = 0; t < batch->tokens; t += most) {
        j.batch.tokens = batch->tokens - t < most ? batch->tokens - t : most;
        if (batch->x) j.batch.x = (const uint8_t *)batch->x + t * x_bytes;
        if (batch->y) j.batch.y = (uint8_t *)batch->y + t * y_bytes;
        j.batch.ids = batch->ids + t * batch->top_k;
        j.batch.weights = batch->weights + t * batch->top_k;
        if (batch->rows)
            j.batch.rows = batch->rows + t * batch->top_k;
        else
            j.batch.kept = kept_from(&j, &batch->kept, t * batch->top_k);
        const int error = chunk(&j);
        if (error) return error;
    }
    return 0;
}
