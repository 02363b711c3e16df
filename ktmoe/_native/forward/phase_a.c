/* Phase A: h[slot] = bf16(act(x[token] Wg^T + bg, x[token] Wu^T + bu)), 64 columns at a time; or what the batch has as its h. */
#include <string.h>

#include "forward/low_rank.h"

/* Where an item is. */
typedef struct place {
    const kt_strip *strip;
    size_t number, panel; /* of the strip, of gate and up */
    size_t half;          /* 0: gate, 1: up */
} place;

static place place_of(const kt_worker_job *w, size_t item) {
    const kt_shard_lists *lists = w->shard->lists;
    const size_t per_strip = lists->of[KT_PHASE_A].per_strip, at = item % per_strip;
    return (place){&w->job->schedule.strips[item / per_strip], item / per_strip, at >> lists->halves,
                   lists->halves ? at % 2 : 0};
}

static const kt_expert *expert_of(const kt_worker_job *w, const kt_strip *strip) {
    return &w->shard->shard->experts[w->job->route.pieces[strip->piece].expert];
}

/* What the worker reads next. */
static kt_ahead ahead(kt_worker_job *w) {
    const kt_run *next = &w->runs[KT_PHASE_A];
    if (next->first == next->end) {
        const bool more = kt_list_rounds_left(&w->shard->lists->of[KT_PHASE_A], &w->lists[KT_PHASE_A]);
        return more || !kt_sums(w->job) ? (kt_ahead){0} : kt_ahead_b(w);
    }
    const place p = place_of(w, next->first);
    const kt_expert *e = expert_of(w, p.strip);
    const uint8_t *of[2] = {e->gate.data + p.panel * e->gate.panel_bytes, e->up.data + p.panel * e->up.panel_bytes};
    return (kt_ahead){{of[p.half], of[1]}, p.half ? e->up.panel_bytes : e->gate.panel_bytes};
}

static bool multiplied_together(const kt_expert *e) {
    return e->gate.kernel == e->up.kernel && e->gate.codebook == e->up.codebook && e->gate.scale_group == e->up.scale_group;
}

/* A kernel's arguments for a panel of a matrix; gate_and_up() adds the panel of up where one kernel takes both. */
static kt_dot dot_of(const kt_worker_job *w, const kt_matrix *of, size_t panel, size_t row, size_t m) {
    return (kt_dot){
        .x = w->job->forms[of->x_form].x + row,
        .m = m,
        .k = w->job->k_hidden,
        .w = {of->data + panel * of->panel_bytes},
        .panels = 1,
        .scale_group = of->scale_group,
        .codebook = of->codebook,
        .scratch = w->scratch->kernel,
    };
}

static void gate_and_up(const kt_worker_job *w, const kt_expert *e, size_t panel, size_t row, size_t m, const kt_ahead *next) {
    const kt_worker_scratch *s = w->scratch;
    kt_dot gate = dot_of(w, &e->gate, panel, row, m), up = dot_of(w, &e->up, panel, row, m);
    gate.out[0] = *s->g, up.out[0] = *s->u;
    if (next)
        gate.next[0] = next->panel[0], gate.next[1] = up.next[0] = next->panel[1],
        gate.next_bytes = up.next_bytes = next->bytes;
    if (!multiplied_together(e)) {
        kt_multiply(&gate, e->gate.kernel);
        kt_multiply(&up, e->up.kernel);
        return;
    }
    gate.panels = 2;
    gate.w[1] = up.w[0];
    gate.out[1] = up.out[0];
    kt_multiply(&gate, e->gate.kernel);
}

/* Columns of h that a shard has, at most KT_PANEL from its `first` on. */
static size_t columns_from(const kt_shard_job *p, size_t first) {
    const size_t left = p->shard->intermediate - first;
    return left < KT_PANEL ? left : KT_PANEL;
}

/* The batch's row of h for a slot, from a column of the shard on. */
static uint16_t *h_of(const kt_worker_job *w, size_t slot, size_t first) {
    const kt_batch *b = &w->job->batch;
    return b->h + w->job->route.slot_row[slot] * b->h_columns + w->shard->shard->first + first;
}

/* A panel of h, in the worker's scratch, becomes part of rows as down's kernel takes them. */
static void put_h(const kt_worker_job *w, const kt_rows *rows, size_t first, size_t row, size_t m) {
    const kt_shard_job *p = w->shard;
    const kt_block_rule *rule = w->job->layer->round_h;
    const size_t left = p->k_inter - first, count = left < KT_PANEL ? left : KT_PANEL;
    for (size_t r = 0; r < m; r++) {
        uint16_t *h = w->scratch->h[r];
        if (rule && w->job->batch.stages != KT_DOWN) kt_blocks_round(rule, h, count);
        kt_row_put(rows, rule && rule->e2m1, h, first, count, p->k_inter, w->job->together[row + r],
                   (void *)p->h_rows[row + r]);
    }
}

/* Takes the batch's h, in place of what activate() computes. */
static void take_h(const kt_worker_job *w, place at) {
    const size_t first = at.panel * KT_PANEL, columns = columns_from(w->shard, first);
    for (size_t i = 0, m; i < at.strip->rows; i += m) {
        const size_t row = at.strip->first + i;
        m = kt_call_rows(at.strip->rows - i);
        for (size_t r = 0; r < m; r++) {
            memset(w->scratch->h[r], 0, sizeof *w->scratch->h);
            memcpy(w->scratch->h[r], h_of(w, row + r, first), columns * sizeof(uint16_t));
        }
        put_h(w, expert_of(w, at.strip)->down.kernel->rows, first, row, m);
    }
}

/* Copies g and u, which backward needs, from the worker's scratch to the batch's rows. */
static void keep(const kt_worker_job *w, size_t first, size_t columns, size_t row, size_t m) {
    const kt_job *j = w->job;
    for (size_t r = 0; r < m; r++) {
        const size_t at = j->route.slot_row[row + r] * j->intermediate + w->shard->shard->first + first;
        memcpy(j->batch.kept.g + at, w->scratch->kept[0][r], columns * sizeof(float));
        memcpy(j->batch.kept.u + at, w->scratch->kept[1][r], columns * sizeof(float));
    }
}

static kt_finish finish_of(const kt_worker_job *w, const kt_adding *of, const kt_matrix *matrix, size_t panel) {
    kt_finish f = kt_finish_of(matrix, panel);
    f.added = kt_added(w->job, w->scratch, of, of->matrix);
    return f;
}

/* Computes h of g and u in the worker's scratch. */
static void activate(const kt_worker_job *w, place at, size_t row, size_t m) {
    const kt_expert *e = expert_of(w, at.strip);
    const size_t panel = at.panel;
    const kt_job *j = w->job;
    const kt_layer *l = j->layer;
    const kt_shard_job *p = w->shard;
    const kt_worker_scratch *s = w->scratch;
    const kt_rows *rows = e->down.kernel->rows;
    const bool given = j->batch.stages == KT_GATE_UP, kept = j->batch.kept.g;
    const bool in_scratch = given || p->bf16_h || rows->encode || rows->tiled || l->round_h;
    const size_t first = panel * KT_PANEL, columns = columns_from(p, first);
    const kt_adding gate = {KT_OF_GATE, j->route.pieces[at.strip->piece].expert, row, m, p->shard->first + first, columns};
    kt_adding up = gate;
    up.matrix = KT_OF_UP;
    uint16_t *h = (uint16_t *)(p->h + row * p->h_stride_bytes) + first;
    l->isa->activate(&(kt_activate){
        .g = *s->g,
        .u = *s->u,
        .finish_g = finish_of(w, &gate, &e->gate, panel),
        .finish_u = finish_of(w, &up, &e->up, panel),
        .r = l->router_weight == KT_DOWN_INPUT ? j->route.slot_weight + row : NULL,
        .m = m,
        .columns = columns,
        .act = l->act,
        .h = in_scratch ? *s->h : h,
        .h_stride = in_scratch ? KT_PANEL : p->h_stride_bytes / sizeof *h,
        .kept_g = kept ? *s->kept[0] : NULL,
        .kept_u = kept ? *s->kept[1] : NULL,
        .kept_stride = KT_PANEL,
    });
    if (kept) keep(w, first, columns, row, m);
    for (size_t r = 0; given && r < m; r++) memcpy(h_of(w, row + r, first), s->h[r], columns * sizeof *h);
    for (size_t r = 0; p->bf16_h && r < m; r++)
        memcpy(p->bf16_h + (row + r) * p->shard->intermediate + first, s->h[r], columns * sizeof *h);
    if (kt_sums(j) && in_scratch) put_h(w, rows, first, row, m);
}

static void pair(const kt_worker_job *w, place at, const kt_ahead *next) {
    const kt_expert *e = expert_of(w, at.strip);
    if (w->job->batch.stages == KT_DOWN) {
        take_h(w, at);
        return;
    }
    for (size_t i = 0, m; i < at.strip->rows; i += m) {
        m = kt_call_rows(at.strip->rows - i);
        gate_and_up(w, e, at.panel, at.strip->first + i, m, i + m == at.strip->rows ? next : NULL);
        activate(w, at, at.strip->first + i, m);
    }
}

/* Computes gate or up of a panel; whoever comes second has both. Returns the items that are done now, 0 or 2. Halves have rows
 * for one call. */
static uint32_t half(const kt_worker_job *w, place at, const kt_ahead *next) {
    const kt_shard_job *p = w->shard;
    const kt_expert *e = expert_of(w, at.strip);
    const kt_matrix *of = at.half ? &e->up : &e->gate;
    if (w->job->batch.stages == KT_DOWN) { /* gate's half is all of it */
        if (!at.half) take_h(w, at);
        return 1;
    }
    kt_panel_row *const own[2] = {w->scratch->g, w->scratch->u};
    kt_dot dot = dot_of(w, of, at.panel, at.strip->first, at.strip->rows);
    dot.next[0] = next->panel[0], dot.next_bytes = next->bytes;
    dot.out[0] = *own[at.half];
    kt_multiply(&dot, of->kernel);
    kt_panel_row *kept[2];
    for (size_t i = 0; i < 2; i++)
        kept[i] = p->halves + (i * p->inter_panels + at.panel) * w->job->route.num_slots + at.strip->first;
    memcpy(kept[at.half], own[at.half], at.strip->rows * sizeof(kt_panel_row));
    if (!atomic_exchange_explicit(&p->met[at.number * p->inter_panels + at.panel], 1, memory_order_acq_rel)) return 0;
    memcpy(own[!at.half], kept[!at.half], at.strip->rows * sizeof(kt_panel_row));
    activate(w, at, at.strip->first, at.strip->rows);
    return 2;
}

void kt_phase_a(kt_worker_job *w) {
    const kt_run *run = &w->runs[KT_PHASE_A];
    const bool halves = w->shard->lists->halves;
    uint32_t done = 0;
    kt_advance(w, KT_PHASE_A, 0);
    while (run->first < run->end) {
        const place at = place_of(w, run->first);
        const size_t items =
            kt_items_together(&w->job->schedule, w->shard->lists->of[KT_PHASE_A].shard, KT_PHASE_A, run->first, run->end);
        const size_t next = kt_advance(w, KT_PHASE_A, items);
        const kt_ahead then = ahead(w);
        if (halves && items == 1)
            done += half(w, at, &then);
        else {
            pair(w, at, &then);
            done += (uint32_t)items;
        }
        if (run->first == next && next < run->end && place_of(w, next).strip == at.strip) continue;
        if (done) kt_gate_pass(&w->shard->gates[at.strip->piece], done); /* once for a strip of a run */
        done = 0;
        if (run->first == run->end) kt_advance(w, KT_PHASE_A, 0);
    }
}
