/* The gradients of a batch: chunks of tokens, each routed as a whole, in windows of slots that the scratch memory has room for.
 *
 * A chunk costs the decoding of all its experts' weights, a window that of its own experts: so tokens are cut only where what is kept
 * for each of them is too much.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "backward/job.h"
#include "backward/step.h"
#include "base/pool.h"

static int more_rows_first(const void *a, const void *b) {
    const kt_back_strip *x = a, *y = b;
    if (x->rows != y->rows) return x->rows < y->rows ? 1 : -1;
    return x->first < y->first ? -1 : 1;
}

/* The chunk's slots [first, end), or less: an expert's are not cut without need. */
static size_t window_end(const kt_back_job *j, size_t first, size_t most) {
    const kt_route *r = &j->route;
    if (r->num_slots - first <= most) return r->num_slots;
    size_t end = first + most;
    for (const kt_piece *p = r->pieces; p < r->pieces + r->num_pieces; p++)
        if (p->first > first && p->first <= first + most) end = p->first;
    return end;
}

static void open_window(kt_back_job *j, size_t first, size_t end) {
    const kt_route *r = &j->route;
    j->first = first;
    j->slots = end - first;
    j->last = end == r->num_slots;
    j->num_pieces = j->num_strips = 0;
    for (const kt_piece *p = r->pieces; p < r->pieces + r->num_pieces; p++) {
        const size_t from = p->first > first ? p->first : first, to = p->first + p->count < end ? p->first + p->count : end;
        if (from >= to) continue;
        j->pieces[j->num_pieces] = (kt_piece){p->expert, from - first, to - from};
        for (size_t i = from, m; i < to; i += m) {
            m = kt_call_rows(to - i);
            j->strips[j->num_strips++] = (kt_back_strip){(uint32_t)j->num_pieces, (uint32_t)(i - first), (uint32_t)m};
        }
        j->num_pieces++;
    }
    qsort(j->strips, j->num_strips, sizeof *j->strips, more_rows_first);
}

/* What forward would have kept of the window's slots. */
static int keep_again(kt_back_job *j) {
    kt_batch b = j->to.batch;
    const size_t pairs = b.tokens * b.top_k;
    memset(j->ids, 0xFF, pairs * sizeof *j->ids); /* -1: of no expert */
    for (size_t slot = 0; slot < j->slots; slot++) {
        const size_t pair = j->route.slot_row[j->first + slot];
        j->ids[pair] = j->route.ids[pair];
        j->kept_rows[pair] = (uint32_t)slot;
    }
    b.ids = j->ids, b.rows = j->kept_rows, b.mask = j->route.active;
    b.stages = KT_KEPT;
    b.kept = j->kept;
    return kt_moe_forward(j->layer, &b);
}

static void item(void *job, size_t shard, size_t place, size_t number) {
    kt_back_job *j = job;
    kt_back_shard *p = &j->shards[shard];
    j->step->item(&(kt_back_worker){j, p, &p->workers[place]}, number);
}

static int run(kt_back_job *j, const kt_step *step) {
    kt_items items = {.isa = j->layer->isa, .placement = j->layer->placement, .job = j, .item = item, .shared = step->shared};
    for (size_t i = 0; i < j->num_shards; i++) items.of[i].count = step->items(j, &j->shards[i]);
    j->step = step;
    return kt_items_run(&items);
}

static int window(kt_back_job *j) {
    const bool of_x = j->to.grad_x || j->layer->router_weight == KT_EXPERT_INPUT;
    const kt_step *const steps[] = {
        &kt_step_enter,
        &kt_step_inner,
        &kt_step_lower,
        &kt_step_adapters,
        of_x ? &kt_step_outer : NULL,
        of_x ? &kt_step_sum : NULL,
    };
    int error = j->again ? keep_again(j) : 0;
    for (size_t i = 0; !error && i < sizeof steps / sizeof *steps; i++)
        if (steps[i]) error = run(j, steps[i]);
    for (const kt_piece *p = j->pieces; p < j->pieces + j->num_pieces; p++) j->written[p->expert] = 1;
    return error;
}

static int chunk(kt_back_job *j, size_t most) {
    const kt_batch *b = &j->to.batch;
    kt_route_fill(&j->route, b, j->layer->num_experts, 1);
    memset(j->to.grad_weights, 0, b->tokens * b->top_k * sizeof(float));
    if (!j->route.num_slots && j->to.grad_x) memset(j->to.grad_x, 0, b->tokens * j->layer->hidden * kt_number_bytes(b->dtype));
    int error = 0;
    for (size_t first = 0, end; !error && first < j->route.num_slots; first = end) {
        end = window_end(j, first, most);
        open_window(j, first, end);
        error = window(j);
    }
    return error;
}

static void begin(kt_back_job *j, const kt_layer *l, const kt_backward *to, const kt_teams *teams) {
    *j = (kt_back_job){
        .layer = l,
        .to = *to,
        .k_hidden = kt_round_up(l->hidden, KT_BLOCK),
        .hidden_panels = kt_round_up(l->hidden, KT_PANEL) / KT_PANEL,
        .products = kt_products_of(l->isa),
        .kept = to->batch.kept,
        .again = !to->batch.kept.g,
        .num_shards = kt_shards_of(l->placement),
    };
    for (size_t i = 0; i < j->num_shards; i++) {
        kt_back_shard *p = &j->shards[i];
        p->shard = &l->shards[i];
        p->team = &teams->of[i];
        p->inter_panels = kt_round_up(p->shard->intermediate, KT_PANEL) / KT_PANEL;
        j->intermediate += p->shard->intermediate;
    }
}

/* Points the job at the tokens from `first` on. */
static void go_to(kt_back_job *j, const kt_backward *all, size_t first, size_t tokens) {
    const kt_batch *b = &all->batch;
    const size_t pair = first * b->top_k, at = first * j->layer->hidden, x_bytes = kt_number_bytes(b->dtype);
    j->to.batch.tokens = tokens;
    j->to.batch.x = (const uint8_t *)b->x + at * x_bytes;
    j->to.batch.ids = b->ids + pair;
    j->to.batch.weights = b->weights + pair;
    j->to.grad_y = (const uint8_t *)all->grad_y + at * kt_number_bytes(all->grad_dtype);
    if (all->grad_x) j->to.grad_x = (uint8_t *)all->grad_x + at * x_bytes;
    j->to.grad_weights = all->grad_weights + pair;
    if (j->again) return;
    j->kept.g = b->kept.g + pair * j->intermediate;
    j->kept.u = b->kept.u + pair * j->intermediate;
    if (b->kept.t) j->kept.t = b->kept.t + pair * KT_MATRICES * b->adapter->rank;
}

int kt_moe_backward(const kt_layer *l, const kt_backward *to) {
    const kt_teams *teams = kt_pool_teams(l->placement);
    if (!teams) return ENOMEM;
    kt_back_job j;
    begin(&j, l, to, teams);
    size_t tokens, slots;
    kt_back_chunk(&j, &tokens, &slots);
    if (!kt_back_have(&j, tokens, slots)) return ENOMEM;
    memcpy(j.route.active, to->batch.mask, l->num_experts); /* once: its owner may change it while we run */
    memset(j.written, 0, l->num_experts);
    int error = 0;
    for (size_t t = 0; !error && t < to->batch.tokens; t += tokens) {
        go_to(&j, to, t, kt_columns(to->batch.tokens, t, tokens));
        error = chunk(&j, slots);
    }
    return error ? error : run(&j, &kt_step_clear);
}
