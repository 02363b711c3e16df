/* Phase B: y[token] = sum over its slots, ascending expert, equal ones in slot order, of r * (h[slot] Wd^T + bd).
 *
 * It goes one of two ways, with the same sums. By panel: a worker walks the experts for a run of panels of y at once, since an
 * expert's h is more than a cache keeps, and adds to fp32 slabs that only it writes. By strip: an item is a strip and a panel and
 * writes d; the last to finish a panel adds it up. The second has more items and can begin before phase A has ended, the first needs
 * no memory for d.
 */
#include <string.h>

#include "forward/low_rank.h"

static const kt_expert *expert_of(const kt_worker_job *w, size_t piece) {
    return &w->shard->shard->experts[w->job->route.pieces[piece].expert];
}

static kt_ahead ahead_of(const kt_expert *e, size_t panel, size_t panels) {
    const uint8_t *first = e->down.data + panel * e->down.panel_bytes;
    return (kt_ahead){{first, first + (panels - 1) * e->down.panel_bytes}, e->down.panel_bytes};
}

/* The panels of the next item; where panels of y are items, the run is taken when it begins, since it is long. */
static kt_ahead ahead(kt_worker_job *w, size_t panels) {
    const kt_list *list = &w->shard->lists->of[KT_PHASE_B];
    const kt_run *next = &w->runs[KT_PHASE_B];
    if (w->job->schedule.by_panel || next->first == next->end) return (kt_ahead){0};
    const size_t panel = next->first % list->per_strip, left = list->per_strip - panel;
    const kt_strip *strip = &w->job->schedule.strips[next->first / list->per_strip];
    return ahead_of(expert_of(w, strip->piece), panel, left < panels ? left : panels);
}

kt_ahead kt_ahead_b(kt_worker_job *w) {
    if (!w->job->schedule.by_panel) kt_advance(w, KT_PHASE_B, 0);
    return ahead(w, 2);
}

/* Computes d of one panel, or of two neighbours, into the worker's g and u: two streams of weights are read faster than one. */
static void down(const kt_worker_job *w, size_t piece, size_t panel, size_t panels, size_t row, size_t m, kt_ahead next) {
    const kt_matrix *of = &expert_of(w, piece)->down;
    kt_panel_row *const d[2] = {w->scratch->g, w->scratch->u};
    const kt_dot dot = {
        .x = w->shard->h_rows + row,
        .m = m,
        .k = w->shard->k_inter,
        .w = {of->data + panel * of->panel_bytes, of->data + (panel + panels - 1) * of->panel_bytes},
        .panels = panels,
        .scale_group = of->scale_group,
        .codebook = of->codebook,
        .next = {next.panel[0], next.panel[1]},
        .next_bytes = next.bytes,
        .out = {*d[0], *d[1]},
        .scratch = w->scratch->kernel,
    };
    kt_multiply(&dot, of->kernel);
    for (size_t n = 0; n < panels; n++) {
        kt_finish f = kt_finish_of(of, panel + n);
        if (w->shard == w->job->shards) { /* as the bias, an adapter belongs to the first */
            const size_t first = (panel + n) * KT_PANEL, left = w->job->layer->hidden - first;
            const size_t expert = w->job->route.pieces[piece].expert, columns = left < KT_PANEL ? left : KT_PANEL;
            f.added = kt_added(w->job, w->scratch, &(kt_adding){KT_OF_DOWN, expert, row, m, first, columns}, n);
        }
        kt_finish_rows(d[n], m, &f);
    }
}

/* y += r * d, each rounded: the one order of both ways. */
static void add(float *restrict y, const float *restrict d, float r) {
    for (size_t c = 0; c < KT_PANEL; c++) y[c] += r * d[c];
}

static float output_weight(const kt_job *j, size_t slot) {
    return j->layer->router_weight == KT_DOWN_OUTPUT ? j->route.slot_weight[slot] : 1.0f;
}

static void store(const kt_job *j, size_t token, size_t panel, const float *y) {
    const size_t hidden = j->layer->hidden, first = panel * KT_PANEL, left = hidden - first;
    kt_store(y, left < KT_PANEL ? left : KT_PANEL, j->batch.y, j->batch.y_dtype, token * hidden + first);
}

static kt_panel_row *sums_of(const kt_job *j, const kt_shard_job *p, size_t panel) { return p->sums + panel * j->batch.tokens; }

/* A shard has its sums of a panel of y in a range of tokens: the last one of them adds them up. */
static void summed(const kt_job *j, size_t range, size_t panel) {
    kt_count *there = &j->summed[range * j->hidden_panels + panel];
    if (atomic_fetch_add_explicit(&there->value, 1, memory_order_acq_rel) + 1 != j->num_shards) return;
    for (size_t t = j->route.ranges[range].first; t < j->route.ranges[range].end; t++) {
        kt_panel_row y;
        memcpy(y, sums_of(j, &j->shards[0], panel)[t], sizeof y);
        for (size_t s = 1; s < j->num_shards; s++) add(y, sums_of(j, &j->shards[s], panel)[t], 1.0f);
        store(j, t, panel, y);
    }
}

static void panels_of_y(const kt_worker_job *w, size_t number, size_t first, size_t end) {
    const kt_job *j = w->job;
    const kt_route_range *range = &j->route.ranges[number];
    const size_t pieces_end = range->first_piece + range->num_pieces, tokens = range->end - range->first;
    /* Panel by panel; a token's row is at its number in the range. */
    const bool alone = j->num_shards == 1;
    const size_t stride = alone ? tokens : j->batch.tokens;
    kt_panel_row *const slabs = alone ? w->scratch->slab : sums_of(j, w->shard, first) + range->first;
    for (size_t panel = first; panel < end; panel++) memset(slabs + (panel - first) * stride, 0, tokens * sizeof *slabs);
    for (size_t n = range->first_piece; n < pieces_end; n++) {
        const kt_piece *own = &j->route.pieces[n];
        kt_gate_wait(&w->shard->gates[n]);
        for (size_t i = 0, m; i < own->count; i += m) {
            m = kt_call_rows(own->count - i);
            const size_t row = own->first + i;
            for (size_t panel = first, panels; panel < end; panel += panels) {
                panels = panel + 1 < end ? 2 : 1;
                kt_panel_row *slab = slabs + (panel - first) * stride;
                size_t then = panel + panels, piece = n;
                if (then >= end) { /* the run again, for the expert's next rows or for the next expert */
                    then = first;
                    piece += i + m >= own->count;
                }
                const kt_ahead next =
                    piece < pieces_end ? ahead_of(expert_of(w, piece), then, then + 1 < end ? 2 : 1) : (kt_ahead){0};
                down(w, n, panel, panels, row, m, next);
                for (size_t r = 0; r < m; r++) {
                    kt_panel_row *y = slab + j->route.slot_token[row + r] - range->first;
                    const float weight = output_weight(j, row + r);
                    add(*y, w->scratch->g[r], weight);
                    if (panels == 2) add(y[stride], w->scratch->u[r], weight);
                }
            }
        }
    }
    for (size_t panel = first; panel < end; panel++) {
        if (!alone) summed(j, number, panel);
        for (size_t t = 0; alone && t < tokens; t++) store(j, range->first + t, panel, slabs[(panel - first) * stride + t]);
    }
}

static kt_panel_row *d_row(const kt_job *j, const kt_shard_job *p, size_t slot, size_t panel) {
    return p->d + slot * j->hidden_panels + panel;
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
    if (j->num_shards > 1) summed(j, 0, panel);
}

static void panels_of_d(const kt_worker_job *w, const kt_strip *strip, size_t panel, size_t panels, kt_ahead next) {
    const kt_job *j = w->job;
    const kt_ahead same = ahead_of(expert_of(w, strip->piece), panel, panels);
    for (size_t i = 0, m; i < strip->rows; i += m) {
        m = kt_call_rows(strip->rows - i);
        const size_t row = strip->first + i;
        down(w, strip->piece, panel, panels, row, m, i + m < strip->rows ? same : next);
        for (size_t r = 0; r < m; r++) {
            memcpy(d_row(j, w->shard, row + r, panel), w->scratch->g[r], sizeof(kt_panel_row));
            if (panels == 2) memcpy(d_row(j, w->shard, row + r, panel + 1), w->scratch->u[r], sizeof(kt_panel_row));
        }
    }
    for (size_t n = panel; n < panel + panels; n++)
        if (atomic_fetch_add_explicit(&w->shard->arrived[n].value, 1, memory_order_acq_rel) + 1 == j->schedule.num_strips)
            add_up_panel(j, w->shard, n);
}

void kt_phase_b(kt_worker_job *w) {
    const kt_list *list = &w->shard->lists->of[KT_PHASE_B];
    const kt_schedule *s = &w->job->schedule;
    const kt_run *run = &w->runs[KT_PHASE_B];
    kt_advance(w, KT_PHASE_B, 0);
    while (run->first < run->end) {
        const size_t at = run->first / list->per_strip, panel = run->first % list->per_strip;
        const size_t panels = kt_items_together(s, list->shard, KT_PHASE_B, run->first, run->end);
        if (s->by_panel) {
            panels_of_y(w, at, panel, panel + panels);
            kt_advance(w, KT_PHASE_B, panels);
        } else {
            kt_advance(w, KT_PHASE_B, panels);
            kt_gate_wait(&w->shard->gates[s->strips[at].piece]);
            panels_of_d(w, &s->strips[at], panel, panels, ahead(w, panels));
        }
        if (run->first == run->end) kt_advance(w, KT_PHASE_B, 0);
    }
}
