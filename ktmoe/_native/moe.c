/* One layer's forward pass: a batch in chunks that the scratch memory has room for, each routed and then computed by phases.c. */
#include <errno.h>
#include <string.h>

#include "moe.h"

kt_tuning kt_moe_tuning = {.scratch_bytes = (size_t)256 << 20, .reduce_slots = 256};

size_t kt_round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

static void point_h(const job *j, part *p) {
    for (const group *g = j->route.groups; g < j->route.groups + j->route.num_groups; g++) {
        const kt_rows *rows = p->shard->experts[g->expert].down.kernel->rows;
        for (size_t i = 0; i < g->count; i++) p->h_rows[g->first + i] = kt_row_of(rows, p->h, p->h_stride_bytes, g, i);
    }
    memset((void *)p->arrived, 0, j->hidden_panels * sizeof *p->arrived);
    p->a.next = p->b.next = 0;
}

static int chunk(job *j) {
    route *r = &j->route;
    kt_route_fill(r, &j->batch, j->layer->num_experts);
    j->source = (x_source){j->layer, &j->batch, r, j->together, j->k_hidden};
    if (!r->num_slots) {
        memset(j->batch.y, 0, j->batch.tokens * j->layer->hidden * (j->batch.dtype == KT_F32 ? 4 : 2));
        return 0;
    }
    bool used[KT_X_KINDS] = {false}; /* by an expert that has rows; all shards of a matrix have one kernel */
    for (const group *g = r->groups; g < r->groups + r->num_groups; g++) {
        const kt_expert *e = &j->layer->shards[0].experts[g->expert];
        used[e->gate.x_kind] = used[e->up.x_kind] = true;
        for (size_t i = 0; i < g->count; i++) {
            const size_t left = g->count - i / KT_TILE_ROWS * KT_TILE_ROWS;
            j->together[g->first + i] = left < KT_TILE_ROWS ? (uint8_t)left : KT_TILE_ROWS;
        }
    }
    for (size_t kind = 0; kind < j->x_kinds; kind++) {
        j->x[kind].stage = false;
        if (used[kind]) kt_x_point(&j->source, &j->x[kind]);
    }
    memset((void *)j->summed, 0, j->hidden_panels * sizeof *j->summed);
    for (part *p = j->parts; p < j->parts + j->shards; p++) point_h(j, p);
    return kt_pool_run(kt_phases, j, j->layer->where);
}

bool kt_moe_use(kt_layer *l, kt_matrix *matrix, bool down, const kt_kernel *kernel) {
    if (down) {
        if (kernel->rows->group_bytes > l->h_group_bytes) l->h_group_bytes = kernel->rows->group_bytes;
    } else {
        size_t kind = 0;
        while (kind < KT_X_KINDS && l->x_rows[kind] && l->x_rows[kind] != kernel->rows) kind++;
        if (kind == KT_X_KINDS) return false;
        l->x_rows[kind] = kernel->rows;
        matrix->x_kind = kind;
    }
    matrix->kernel = kernel;
    if (kernel->scratch_bytes > l->kernel_scratch_bytes) l->kernel_scratch_bytes = kernel->scratch_bytes;
    return true;
}

int kt_moe_forward(const kt_layer *l, const kt_batch *batch) {
    job j = {
        .layer = l,
        .batch = *batch,
        .k_hidden = kt_round_up(l->hidden, KT_GROUP),
        .hidden_panels = kt_round_up(l->hidden, KT_PANEL) / KT_PANEL,
        .shards = kt_shards_of(l->where),
    };
    for (; j.x_kinds < KT_X_KINDS && l->x_rows[j.x_kinds]; j.x_kinds++) {
        const kt_rows *rows = l->x_rows[j.x_kinds];
        j.x[j.x_kinds] = (x_kind){
            .rows = rows,
            .by_slot = rows->tiled || l->router_weight == KT_EXPERT_INPUT,
            .stride_bytes = kt_row_bytes(rows->group_bytes, j.k_hidden),
        };
    }
    for (size_t i = 0; i < j.shards; i++) {
        part *p = &j.parts[i];
        p->shard = &l->shards[i];
        p->k_inter = kt_round_up(p->shard->intermediate, KT_GROUP);
        p->inter_panels = kt_round_up(p->shard->intermediate, KT_PANEL) / KT_PANEL;
        p->threads = kt_team_of(i, i, kt_pool_width(l->where), j.shards).size;
        p->h_stride_bytes = kt_row_bytes(l->h_group_bytes, p->inter_panels * KT_PANEL); /* whole panels are written */
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
