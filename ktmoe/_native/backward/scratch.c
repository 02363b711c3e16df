/* Scratch memory of the backward pass: where each array of a job is. */
#include "backward/job.h"
#include "forward/arenas.h"
#include "forward/tuning.h"

static kt_arenas arenas;

kt_arenas *kt_backward_arenas(void) { return &arenas; }

size_t kt_backward_scratch_bytes(void) { return kt_arenas_bytes(&arenas); }

void kt_backward_release(void) { kt_arenas_release(&arenas); }

static size_t rank_of(const kt_back_job *j, size_t matrix) {
    const kt_adapter *a = kt_adapter_of(j, matrix);
    return a ? a->rank : 0;
}

/* Lays out the arrays of a chunk of tokens, which do not depend on the window. */
static void lay_out_tokens(kt_back_job *j, kt_carver *c, size_t tokens, bool sums) {
    const size_t pairs = tokens * j->to.batch.top_k;
    kt_route_carve(&j->route, c, j->layer->num_experts, tokens, j->to.batch.top_k, 1);
    j->written = kt_carve(c, j->layer->num_experts, 1);
    j->ids = kt_carve(c, j->again ? pairs : 0, sizeof *j->ids);
    j->kept_rows = kt_carve(c, j->again ? pairs : 0, sizeof *j->kept_rows);
    j->sums = sums ? kt_carve(c, tokens * j->layer->hidden, sizeof *j->sums) : NULL;
}

/* Lays out the arrays of a window of slots. */
static void lay_out_slots(kt_back_job *j, kt_carver *c, size_t slots) {
    const size_t pieces = slots < j->layer->num_experts ? slots : j->layer->num_experts;
    const size_t again = j->again ? slots : 0, rank = j->to.batch.adapter ? j->to.batch.adapter->rank : 0;
    j->pieces = kt_carve(c, pieces, sizeof *j->pieces);
    j->strips = kt_carve(c, pieces + slots / KT_TILE_ROWS, sizeof *j->strips);
    j->dy = kt_product_rows_carve(&j->products, c, slots, j->hidden_panels);
    for (size_t p = 0; p < KT_MATRICES; p++) j->dt[p] = kt_carve(c, slots * rank_of(j, p), sizeof *j->dt[p]);
    j->dr_bias = kt_carve(c, slots, sizeof *j->dr_bias);
    if (!j->again) return;
    j->kept.g = kt_carve(c, again * j->intermediate, sizeof(float));
    j->kept.u = kt_carve(c, again * j->intermediate, sizeof(float));
    j->kept.t = rank ? kt_carve(c, again * KT_MATRICES * rank, sizeof(float)) : NULL;
}

static size_t lay_out(kt_back_job *j, uint8_t *base, size_t tokens, size_t slots) {
    kt_carver c = {base, 0};
    const bool sums = j->to.grad_x && j->to.batch.dtype == KT_BF16 && slots < tokens * j->to.batch.top_k;
    lay_out_tokens(j, &c, tokens, sums);
    lay_out_slots(j, &c, slots);
    for (kt_back_shard *p = j->shards; p < j->shards + j->num_shards; p++)
        p->workers = kt_carve(&c, p->team->size, sizeof *p->workers);
    return c.used;
}

static kt_back_scratch worker(const kt_back_job *j, kt_carver *c) {
    const size_t rank = j->to.batch.adapter ? j->to.batch.adapter->rank : 0;
    return (kt_back_scratch){
        .product = kt_product_scratch_carve(j->products.scratch_bytes, c),
        .g = kt_carve(c, KT_ROWS_MAX, sizeof(kt_panel_row)),
        .u = kt_carve(c, KT_ROWS_MAX, sizeof(kt_panel_row)),
        .dg = kt_carve(c, KT_ROWS_MAX, sizeof(kt_panel_h)),
        .du = kt_carve(c, KT_ROWS_MAX, sizeof(kt_panel_h)),
        .h = kt_carve(c, KT_ROWS_MAX, sizeof(kt_panel_h)),
        .wide = kt_carve(c, KT_TILE_ROWS * KT_TILE_COLUMNS, sizeof(float)),
        .wide_t = kt_carve(c, KT_TILE_ROWS * rank, sizeof(float)),
        .low = kt_carve(c, KT_TILE_COLUMNS * rank, sizeof(float)),
        .row = kt_carve(c, j->hidden_panels * KT_PANEL, sizeof(uint16_t)),
        .sum = kt_carve(c, j->layer->hidden, sizeof(float)),
    };
}

static size_t lay_out_shard(const kt_back_job *j, kt_back_shard *p, uint8_t *base, size_t slots) {
    kt_carver c = {base, 0};
    const size_t numbers = slots * p->shard->intermediate;
    const bool input = j->layer->router_weight == KT_EXPERT_INPUT;
    p->dg = kt_product_rows_carve(&j->products, &c, slots, p->inter_panels);
    p->du = kt_product_rows_carve(&j->products, &c, slots, p->inter_panels);
    for (size_t m = KT_OF_GATE; m <= KT_OF_UP; m++)
        p->plain[m] = kt_adapter_of(j, m) ? kt_carve(&c, numbers, sizeof **p->plain) : NULL;
    p->h = kt_adapter_of(j, KT_OF_DOWN) ? kt_carve(&c, numbers, sizeof *p->h) : NULL;
    p->dr = kt_carve(&c, p->inter_panels * slots, sizeof *p->dr);
    p->dx = kt_carve(&c, j->to.grad_x || input ? slots * j->hidden_panels : 0, sizeof(kt_panel_row));
    for (size_t i = 0; i < p->team->size; i++) {
        const kt_back_scratch s = worker(j, &c);
        if (base) p->workers[i] = s;
    }
    return c.used;
}

static size_t need(kt_back_job *j, size_t tokens, size_t slots) {
    size_t bytes = lay_out(j, NULL, tokens, slots);
    for (kt_back_shard *p = j->shards; p < j->shards + j->num_shards; p++) bytes += lay_out_shard(j, p, NULL, slots);
    return bytes;
}

void kt_back_chunk(kt_back_job *j, size_t *tokens, size_t *slots) {
    size_t t = j->to.batch.tokens;
    while (need(j, t, 1) > kt_moe_tuning.scratch_bytes / 2 && t > 1) t = (t + 1) / 2;
    size_t most = t * j->to.batch.top_k;
    while (need(j, t, most) > kt_moe_tuning.scratch_bytes && most > 1) most = (most + 1) / 2;
    *tokens = t, *slots = most;
}

bool kt_back_have(kt_back_job *j, size_t tokens, size_t slots) {
    kt_arena_sizes sizes = {
        .placement = j->layer->placement, .bound = kt_moe_tuning.scratch_bytes, .common = lay_out(j, NULL, tokens, slots)};
    for (size_t i = 0; i < j->num_shards; i++) sizes.of[i] = lay_out_shard(j, &j->shards[i], NULL, slots);
    if (!kt_arenas_have(&arenas, &sizes)) return false;
    lay_out(j, arenas.common.base, tokens, slots);
    for (size_t i = 0; i < j->num_shards; i++) lay_out_shard(j, &j->shards[i], arenas.of[i].base, slots);
    return true;
}
