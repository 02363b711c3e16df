/* One layer's forward pass: a batch in chunks that the scratch memory has room for, each routed and then computed by phases.c. */
#include <errno.h>
#include <string.h>

#include "base/pool.h"
#include "forward/job.h"

kt_tuning kt_moe_tuning = {.scratch_bytes = (size_t)256 << 20, .reduce_slots = 256};

static void point_h(const kt_job *j, kt_shard_job *p) {
    for (const kt_expert_rows *own = j->route.used; own < j->route.used + j->route.num_used; own++) {
        const kt_rows *rows = p->shard->experts[own->expert].down.kernel->rows;
        for (size_t i = 0; i < own->count; i++) p->h_rows[own->first + i] = kt_row_of(rows, p->h, p->h_stride_bytes, own, i);
    }
    memset((void *)p->arrived, 0, j->hidden_panels * sizeof *p->arrived);
    p->a.next = p->b.next = 0;
    kt_gate_close(&p->h_there, (uint32_t)p->team.size);
}

static int chunk(kt_job *j) {
    kt_route *r = &j->route;
    kt_route_fill(r, &j->batch, j->layer->num_experts);
    j->x = (kt_x){j->layer, &j->batch, r, j->together, j->k_hidden};
    if (!r->num_slots) {
        memset(j->batch.y, 0, j->batch.tokens * j->layer->hidden * (j->batch.dtype == KT_F32 ? 4 : 2));
        return 0;
    }
    bool used[KT_X_FORMS] = {false}; /* by an expert that has rows; all shards of a matrix have one kernel */
    for (const kt_expert_rows *own = r->used; own < r->used + r->num_used; own++) {
        const kt_expert *e = &j->layer->shards[0].experts[own->expert];
        used[e->gate.x_form] = used[e->up.x_form] = true;
        for (size_t i = 0; i < own->count; i++) {
            const size_t left = own->count - i / KT_TILE_ROWS * KT_TILE_ROWS;
            j->together[own->first + i] = left < KT_TILE_ROWS ? (uint8_t)left : KT_TILE_ROWS;
        }
    }
    for (size_t i = 0; i < j->num_forms; i++) {
        j->forms[i].stage = false;
        if (used[i]) kt_x_point(&j->x, &j->forms[i]);
    }
    memset((void *)j->summed, 0, j->hidden_panels * sizeof *j->summed);
    for (kt_shard_job *p = j->shards; p < j->shards + j->num_shards; p++) point_h(j, p);
    return kt_pool_run(kt_phases, j, j->layer->placement);
}

int kt_moe_forward(const kt_layer *l, const kt_batch *batch) {
    kt_job j = {
        .layer = l,
        .batch = *batch,
        .k_hidden = kt_round_up(l->hidden, KT_BLOCK),
        .hidden_panels = kt_round_up(l->hidden, KT_PANEL) / KT_PANEL,
        .num_shards = kt_shards_of(l->placement),
    };
    for (; j.num_forms < KT_X_FORMS && l->x_rows[j.num_forms]; j.num_forms++) {
        const kt_rows *rows = l->x_rows[j.num_forms];
        j.forms[j.num_forms] = (kt_x_form){
            .rows = rows,
            .by_slot = rows->tiled || l->router_weight == KT_EXPERT_INPUT,
            .stride_bytes = kt_row_bytes(rows->block_bytes, j.k_hidden),
        };
    }
    const kt_teams *teams = kt_pool_teams(l->placement);
    if (!teams) return ENOMEM;
    for (size_t i = 0; i < j.num_shards; i++) {
        kt_shard_job *p = &j.shards[i];
        p->shard = &l->shards[i];
        p->k_inter = kt_round_up(p->shard->intermediate, KT_BLOCK);
        p->inter_panels = kt_round_up(p->shard->intermediate, KT_PANEL) / KT_PANEL;
        p->team = teams->of[i];
        p->h_stride_bytes = kt_row_bytes(l->h_block_bytes, p->inter_panels * KT_PANEL); /* whole panels are written */
    }

    size_t most = batch->tokens; /* a chunk's */
    while (most > 1 && kt_scratch_need(&j, most) > kt_moe_tuning.scratch_bytes) most = (most + 1) / 2;
    if (!kt_scratch_have(&j, most)) return ENOMEM;
    memcpy(j.route.active, batch->mask, l->num_experts); /* once: its owner may change it while we run */

    const size_t row_bytes = l->hidden * (batch->dtype == KT_F32 ? 4 : 2);
    for (size_t t = 0; t < batch->tokens; t += most) {
        j.batch.tokens = batch->tokens - t < most ? batch->tokens - t : most;
        j.batch.x = (const uint8_t *)batch->x + t * row_bytes;
        j.batch.y = (uint8_t *)batch->y + t * row_bytes;
        j.batch.ids = batch->ids + t * batch->top_k;
        j.batch.weights = batch->weights + t * batch->top_k;
        const int error = chunk(&j);
        if (error) return error;
    }
    return 0;
}
