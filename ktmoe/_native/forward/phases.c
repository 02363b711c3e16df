/* The two phases of a forward pass, under one pool dispatch.
 *
 * SHAPES      x [tokens][hidden], ids and weights [tokens][top_k], y [tokens][hidden]; slots as in route.h
 * DEFINITION  A: h[slot] = bf16(act(x[token] Wg^T + bg, x[token] Wu^T + bu))             items (expert, 64 columns of h)
 *             B: y[token] = sum over its slots, ascending expert, equal ones in slot order, of r * (h[slot] Wd^T + bd)
 * REGULARITIES the thread count and the rest of the batch decide only in which order independent items run, and which of
 *             two functions with equal bits computes them; every sum has one order.
 *
 * Phase B goes one of two ways, with the same sums. Many slots: an item is a panel of y; a worker walks the experts for a run of panels at
 * once, since an expert's h is more than a cache keeps, and adds to private fp32 slabs. Few slots: an item is (expert, panel) and
 * writes d; the last to finish a panel adds it up. The second keeps more cores busy at decode, the first needs no memory for d.
 *
 * SHARDS      Each has some of h's columns, and so some of down's k. Its own threads compute and keep its sums. Whoever finishes the
 *             last shard's sums of a panel adds them all up, in the shards' order. x is staged once, for all.
 */
#include <stdatomic.h>
#include <string.h>

#include "base/pool.h"
#include "forward/job.h"

/* The next run of items, `longest` at most: [*first, end). Neighbours are neighbours in memory, so that what a kernel prefetches
 * beyond its panel is the same worker's next: so runs are as long as may be. They shrink towards the end, so that all workers end
 * together. Tests force uneven ones. */
static size_t grab(kt_counter *c, size_t items, size_t workers, size_t longest, size_t *first) {
    const size_t seen = atomic_load_explicit(&c->next, memory_order_relaxed), left = seen < items ? items - seen : 0;
    size_t run = left / (RUNS_LEFT * workers);
    if (kt_moe_tuning.uneven) run = 1 + (size_t)(((uint64_t)(seen + 1) * kt_moe_tuning.uneven * 0x9E3779B97F4A7C15u) >> 61);
    run = run < 1 ? 1 : run > longest ? longest : run;
    *first = atomic_fetch_add_explicit(&c->next, run, memory_order_relaxed);
    return *first + run < items ? *first + run : items;
}

static void multiply(const kt_dot *dot, const kt_kernel *kernel) {
    (!kt_moe_tuning.only_many && dot->m <= kernel->few_max ? kernel->few : kernel->many)(dot);
}

/* Rows of the next kernel call: equal calls of at most KT_ROWS_MAX, all of whole tiles but for the last. */
static size_t call_rows(size_t left) {
    const size_t calls = (left + KT_ROWS_MAX - 1) / KT_ROWS_MAX;
    return calls == 1 ? left : kt_round_up((left + calls - 1) / calls, KT_TILE_ROWS);
}

static kt_finish finish_of(const kt_matrix *w, size_t panel) {
    return (kt_finish){
        .factor = w->factor ? w->factor + panel * w->factor_step : NULL,
        .divides = w->divides,
        .bias = w->bias ? w->bias + panel * KT_PANEL : NULL,
    };
}

/* What a worker is likely to go on with; expert NULL: nothing is known. */
typedef struct next_item {
    const kt_expert *expert;
    size_t panel;
} next_item;

static void gate_up(const kt_job *j, const kt_shard_job *p, const kt_worker_scratch *s, const kt_expert_rows *own, size_t panel,
                    next_item next) {
    const kt_layer *l = j->layer;
    const kt_expert *e = &p->shard->experts[own->expert];
    const kt_rows *rows = e->down.kernel->rows;
    const bool put_h = rows->encode || rows->tiled || rows->round;
    const size_t columns = p->shard->intermediate - panel * KT_PANEL;
    for (size_t i = 0, m; i < own->count; i += m) {
        m = call_rows(own->count - i);
        const size_t row = own->first + i;
        kt_dot dot = {
            .x = j->forms[e->gate.x_form].x + row,
            .m = m,
            .k = j->k_hidden,
            .w = {e->gate.data + panel * e->gate.panel_bytes, e->up.data + panel * e->up.panel_bytes},
            .panels = 2,
            .scale_group = e->gate.scale_group,
            .codebook = e->gate.codebook,
            .next_bytes = e->gate.panel_bytes,
            .out = {*s->g, *s->u},
            .scratch = s->kernel,
        };
        if (next.expert && i + m == own->count) {
            dot.next[0] = next.expert->gate.data + next.panel * e->gate.panel_bytes;
            dot.next[1] = next.expert->up.data + next.panel * e->up.panel_bytes;
        }
        if (e->gate.kernel == e->up.kernel && e->gate.codebook == e->up.codebook && e->gate.scale_group == e->up.scale_group) {
            multiply(&dot, e->gate.kernel);
        } else {
            dot.panels = 1;
            multiply(&dot, e->gate.kernel);
            dot.x = j->forms[e->up.x_form].x + row;
            dot.w[0] = dot.w[1];
            dot.next[0] = dot.next[1];
            dot.next_bytes = e->up.panel_bytes;
            dot.out[0] = dot.out[1];
            dot.scale_group = e->up.scale_group;
            dot.codebook = e->up.codebook;
            multiply(&dot, e->up.kernel);
        }
        uint16_t *h = (uint16_t *)(p->h + row * p->h_stride_bytes) + panel * KT_PANEL;
        l->isa->activate(&(kt_activate){
            .g = *s->g,
            .u = *s->u,
            .finish_g = finish_of(&e->gate, panel),
            .finish_u = finish_of(&e->up, panel),
            .r = l->router_weight == KT_DOWN_INPUT ? j->route.slot_weight + row : NULL,
            .m = m,
            .columns = columns < KT_PANEL ? columns : KT_PANEL,
            .act = l->act,
            .h = put_h ? *s->h : h,
            .h_stride = put_h ? KT_PANEL : p->h_stride_bytes / sizeof *h,
        });
        const size_t first = panel * KT_PANEL, left = p->k_inter - first, count = left < KT_PANEL ? left : KT_PANEL;
        for (size_t r = row; rows->round && r < row + m; r++) rows->round(s->h[r - row], KT_PANEL);
        for (size_t r = row; put_h && r < row + m; r++)
            kt_row_put(rows, s->h[r - row], first, count, p->k_inter, j->together[r], (void *)p->h_rows[r]);
    }
}

/* Of a panel's columns; compiled for any CPU, and no compiler option lets it contract a product and a sum. */
static void finish(kt_panel_row *d, size_t m, const kt_finish *f) {
    for (size_t i = 0; i < m; i++) {
        float *restrict row = d[i];
        for (size_t c = 0; f->factor && c < KT_PANEL; c++) row[c] = f->divides ? row[c] / f->factor[c] : row[c] * f->factor[c];
        for (size_t c = 0; f->bias && c < KT_PANEL; c++) row[c] += f->bias[c];
    }
}

/* d of one panel, or of two neighbours, into s->g and s->u: two streams of weights are read faster than one. */
static void down(const kt_shard_job *p, const kt_worker_scratch *s, const kt_expert_rows *own, size_t panel, size_t panels,
                 size_t row, size_t m, next_item next) {
    const kt_matrix *w = &p->shard->experts[own->expert].down;
    kt_panel_row *const d[2] = {s->g, s->u};
    const uint8_t *after = next.expert ? next.expert->down.data + next.panel * w->panel_bytes : NULL;
    const kt_dot dot = {
        .x = p->h_rows + row,
        .m = m,
        .k = p->k_inter,
        .w = {w->data + panel * w->panel_bytes, w->data + (panel + panels - 1) * w->panel_bytes},
        .panels = panels,
        .scale_group = w->scale_group,
        .codebook = w->codebook,
        .next = {after, after ? after + w->panel_bytes : NULL},
        .next_bytes = w->panel_bytes,
        .out = {*d[0], *d[1]},
        .scratch = s->kernel,
    };
    multiply(&dot, w->kernel);
    for (size_t n = 0; n < panels; n++) {
        const kt_finish f = finish_of(w, panel + n);
        finish(d[n], m, &f);
    }
}

/* y += r * d, each rounded: the one order of both ways of phase B. */
static void add(float *restrict y, const float *restrict d, float r) {
    for (size_t c = 0; c < KT_PANEL; c++) y[c] += r * d[c];
}

static float output_weight(const kt_job *j, size_t slot) {
    return j->layer->router_weight == KT_DOWN_OUTPUT ? j->route.slot_weight[slot] : 1.0f;
}

static void store(const kt_job *j, size_t token, size_t panel, const float *restrict y) {
    const size_t hidden = j->layer->hidden, first = panel * KT_PANEL, left = hidden - first;
    const size_t columns = left < KT_PANEL ? left : KT_PANEL, at = token * hidden + first;
    if (j->batch.dtype == KT_F32) {
        memcpy((float *)j->batch.y + at, y, columns * sizeof *y);
        return;
    }
    uint16_t *restrict to = (uint16_t *)j->batch.y + at;
    for (size_t c = 0; c < columns; c++) to[c] = kt_bf16_from_f32(y[c]);
}

static kt_panel_row *sums_of(const kt_job *j, const kt_shard_job *p, size_t panel) { return p->sums + panel * j->batch.tokens; }

/* A shard has its sums of a panel of y: the last one of them adds them up. */
static void summed(const kt_job *j, size_t panel) {
    if (atomic_fetch_add_explicit(&j->summed[panel], 1, memory_order_acq_rel) + 1 < j->num_shards) return;
    for (size_t t = 0; t < j->batch.tokens; t++) {
        kt_panel_row y;
        memcpy(y, sums_of(j, &j->shards[0], panel)[t], sizeof y);
        for (size_t s = 1; s < j->num_shards; s++) add(y, sums_of(j, &j->shards[s], panel)[t], 1.0f);
        store(j, t, panel, y);
    }
}

static void panels_of_y(const kt_job *j, const kt_shard_job *p, const kt_worker_scratch *s, size_t first, size_t end) {
    const size_t tokens = j->batch.tokens;
    kt_panel_row *const slabs = j->num_shards > 1 ? sums_of(j, p, first) : s->slab;
    memset(slabs, 0, (end - first) * tokens * sizeof *slabs);
    for (size_t n = 0; n < j->route.num_used; n++) {
        const kt_expert_rows *own = &j->route.used[n];
        for (size_t i = 0, m; i < own->count; i += m) {
            m = call_rows(own->count - i);
            const size_t row = own->first + i;
            for (size_t panel = first, panels; panel < end; panel += panels) {
                panels = panel + 1 < end ? 2 : 1;
                kt_panel_row *slab = slabs + (panel - first) * tokens;
                next_item next = {&p->shard->experts[own->expert], panel + panels};
                if (panel + panels >= end) { /* the run again, for the expert's next rows or for the next expert */
                    const bool more = i + m < own->count;
                    next = (next_item){more || n + 1 < j->route.num_used ? &p->shard->experts[own[!more].expert] : NULL, first};
                }
                down(p, s, own, panel, panels, row, m, next);
                for (size_t r = 0; r < m; r++) {
                    kt_panel_row *y = slab + j->route.slot_token[row + r];
                    const float weight = output_weight(j, row + r);
                    add(*y, s->g[r], weight);
                    if (panels == 2) add(y[tokens], s->u[r], weight);
                }
            }
        }
    }
    for (size_t panel = first; panel < end; panel++) {
        if (j->num_shards > 1) summed(j, panel);
        for (size_t t = 0; j->num_shards == 1 && t < tokens; t++) store(j, t, panel, slabs[(panel - first) * tokens + t]);
    }
}

static kt_panel_row *d_row(const kt_job *j, const kt_shard_job *p, size_t slot, size_t panel) {
    return (kt_panel_row *)p->d + slot * j->hidden_panels + panel;
}

static void add_up_panel(const kt_job *j, const kt_shard_job *p, size_t panel) {
    for (size_t t = 0; t < j->batch.tokens; t++) {
        kt_panel_row y = {0};
        for (size_t s = 0; s < j->route.token_count[t]; s++) {
            const size_t slot = j->route.token_slots[t * j->batch.top_k + s];
            add(y, *d_row(j, p, slot, panel), output_weight(j, slot));
        }
        if (j->num_shards > 1)
            memcpy(sums_of(j, p, panel)[t], y, sizeof y);
        else
            store(j, t, panel, y);
    }
    if (j->num_shards > 1) summed(j, panel);
}

static void panels_of_d(const kt_job *j, const kt_shard_job *p, const kt_worker_scratch *s, const kt_expert_rows *own,
                        size_t panel, size_t panels, next_item next) {
    const next_item same = {&p->shard->experts[own->expert], panel};
    for (size_t i = 0, m; i < own->count; i += m) {
        m = call_rows(own->count - i);
        down(p, s, own, panel, panels, own->first + i, m, i + m < own->count ? same : next);
        for (size_t r = 0; r < m; r++) {
            memcpy(d_row(j, p, own->first + i + r, panel), s->g[r], sizeof(kt_panel_row));
            if (panels == 2) memcpy(d_row(j, p, own->first + i + r, panel + 1), s->u[r], sizeof(kt_panel_row));
        }
    }
    for (size_t n = panel; n < panel + panels; n++)
        if (atomic_fetch_add_explicit(&p->arrived[n], 1, memory_order_acq_rel) + 1 == j->route.num_used) add_up_panel(j, p, n);
}

/* After item i of a run that ends at `end`: its next one, or where the counter is. Items are (expert, panel). */
static next_item next_of(const kt_job *j, const kt_shard_job *p, const kt_counter *c, size_t next, size_t end, size_t panels) {
    if (next >= end) next = atomic_load_explicit(&c->next, memory_order_relaxed);
    if (next >= j->route.num_used * panels) return (next_item){0};
    const kt_expert_rows *own = &j->route.used[j->route.by_cost[next / panels]];
    return (next_item){&p->shard->experts[own->expert], next % panels};
}

static void work_on_shard(kt_job *j, kt_shard_job *p, const kt_worker_scratch *s) {
    const kt_route *r = &j->route;
    size_t first, end;
    const size_t items_a = r->num_used * p->inter_panels;
    while ((end = grab(&p->a, items_a, p->team.size, items_a, &first)) > first)
        for (size_t i = first; i < end; i++)
            gate_up(j, p, s, &r->used[r->by_cost[i / p->inter_panels]], i % p->inter_panels,
                    next_of(j, p, &p->a, i + 1, end, p->inter_panels));
    kt_gate_pass(&p->h_there, 1);
    kt_gate_wait(&p->h_there);
    const size_t items_b = j->hidden_panels * (j->reduce ? r->num_used : 1);
    while ((end = grab(&p->b, items_b, p->team.size, j->reduce ? items_b : p->slab_panels, &first)) > first) {
        if (!j->reduce) panels_of_y(j, p, s, first, end);
        for (size_t i = first, panels; j->reduce && i < end; i += panels) {
            const size_t panel = i % j->hidden_panels;
            panels = i + 1 < end && panel + 1 < j->hidden_panels ? 2 : 1;
            panels_of_d(j, p, s, &r->used[r->by_cost[i / j->hidden_panels]], panel, panels,
                        next_of(j, p, &p->b, i + panels, end, j->hidden_panels));
        }
    }
}

void kt_phases(void *context, const kt_worker *me) {
    kt_job *j = context;
    if (j->layer->isa->enter) j->layer->isa->enter();
    const kt_shard_job *own = &j->shards[me->teams->groups[me->group].shard];
    bool staged = false;
    for (const kt_x_form *form = j->forms; form < j->forms + j->num_forms; form++) {
        if (!form->stage) continue;
        kt_x_stage(&j->x, form, me->index, me->teams->workers, own->workers[me->index - own->team.first].row);
        staged = true;
    }
    if (staged) kt_pool_barrier(me);
    for (kt_shard_job *p = j->shards; p < j->shards + j->num_shards; p++)
        if (kt_serves(me, (size_t)(p - j->shards))) work_on_shard(j, p, &p->workers[me->index - p->team.first]);
    if (j->layer->isa->leave) j->layer->isa->leave();
}
