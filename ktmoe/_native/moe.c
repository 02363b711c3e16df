/* One layer's forward pass: two phases under one pool dispatch.
 *
 * SHAPES      x [tokens][hidden], ids and weights [tokens][top_k], y [tokens][hidden]; slots as in moe.h
 * DEFINITION  A: h[slot] = bf16(act(x[token] Wg^T + bg, x[token] Wu^T + bu))             items (expert, 64 columns of h)
 *             B: y[token] = sum over its slots, ascending expert, equal ones in slot order, of r * (h[slot] Wd^T + bd)
 * REGULARITIES the thread count and the rest of the batch decide only in which order independent items run, and which of
 *             two functions with equal bits computes them; every sum has one order.
 *
 * Phase B has two forms with the same sums. Many slots: an item is a panel of y; a worker walks the experts for a run of panels at
 * once, since an expert's h is more than a cache keeps, and adds to private fp32 slabs. Few slots: an item is (expert, panel) and
 * writes d; the last to finish a panel adds it up. The second keeps more cores busy at decode, the first needs no memory for d.
 */
#include <errno.h>
#include <string.h>

#include "moe.h"

/* Of items that one worker takes: the longest run, and how many each worker may still expect. */
enum { LONGEST_RUN = 8, RUNS_LEFT = 4 };

typedef float panel_row[KT_PANEL];
typedef uint16_t panel_h[KT_PANEL]; /* bf16 */

/* Items are handed out by a counter on a cache line of its own. */
typedef struct counter {
    _Alignas(64) _Atomic size_t next;
} counter;

typedef struct worker_scratch {
    panel_row *g, *u; /* [KT_M_BLOCK] each; phase B has d in them, of two panels */
    panel_row *slab;  /* [run_b][tokens] */
    panel_h *h;       /* [KT_M_BLOCK], before rows are encoded */
    uint16_t *row;    /* [k_hidden], likewise */
    void *kernel;
} worker_scratch;

typedef struct job {
    const kt_layer *layer;
    kt_batch batch;
    route route;
    size_t k_hidden, k_inter, hidden_panels, inter_panels; /* padded sizes */
    bool reduce;
    x_source source;
    x_kind x[KT_X_KINDS];
    size_t x_kinds;
    size_t h_stride_bytes;
    uint8_t *h;                /* [slots] rows */
    const void **h_rows;       /* [slots] */
    uint8_t *together;         /* [slots]: see x_source */
    size_t run_b;              /* panels of y that one worker does together, at most */
    float *d;                  /* [slots][hidden_panels * KT_PANEL] */
    _Atomic uint32_t *arrived; /* [hidden_panels] */
    worker_scratch *workers;
    counter a, b;
} job;

kt_tuning kt_moe_tuning = {.scratch_bytes = (size_t)256 << 20, .reduce_slots = 256};

/* The arena: one for all layers, kept between calls, under the pool's lock. */
static struct {
    uint8_t *base;
    size_t bytes;
} arena;

size_t kt_round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }
size_t kt_moe_scratch_bytes(void) { return arena.bytes; }

void *kt_carve(carver *c, size_t count, size_t size) {
    void *p = c->base ? c->base + c->used : NULL;
    c->used += kt_round_up(count * size, 64);
    return p;
}

/* Gives every array of the job its place for a batch of `tokens`; returns the bytes. */
static size_t lay_out(job *j, uint8_t *base, size_t tokens) {
    const kt_layer *l = j->layer;
    const size_t slots = tokens * j->batch.top_k, threads = kt_pool_width();
    carver c = {base, 0};
    j->reduce = slots <= kt_moe_tuning.reduce_slots;
    j->run_b = j->hidden_panels / (RUNS_LEFT * threads); /* grab()'s first */
    j->run_b = j->reduce || j->run_b > LONGEST_RUN ? LONGEST_RUN : j->run_b < 1 ? 1 : j->run_b;
    kt_route_carve(&j->route, &c, l->num_experts, tokens, j->batch.top_k);
    for (x_kind *x = j->x; x < j->x + j->x_kinds; x++) {
        x->x = kt_carve(&c, slots, sizeof *x->x);
        x->staged = kt_carve(&c, x->by_slot ? slots : tokens, x->stride_bytes);
        kt_carve(&c, x->rows->tiled, KT_TILE_ROWS * x->rows->group_bytes); /* may be read */
    }
    j->h_rows = kt_carve(&c, slots, sizeof *j->h_rows);
    j->together = kt_carve(&c, slots, sizeof *j->together);
    j->h = kt_carve(&c, slots, j->h_stride_bytes);
    kt_carve(&c, KT_TILE_ROWS, l->h_group_bytes); /* may be read */
    j->d = kt_carve(&c, j->reduce ? slots * j->hidden_panels : 0, sizeof(panel_row));
    j->arrived = kt_carve(&c, j->hidden_panels, sizeof *j->arrived);
    j->workers = kt_carve(&c, threads, sizeof *j->workers);
    for (size_t i = 0; i < threads; i++) {
        const worker_scratch w = {
            .g = kt_carve(&c, KT_M_BLOCK, sizeof(panel_row)),
            .u = kt_carve(&c, KT_M_BLOCK, sizeof(panel_row)),
            .slab = kt_carve(&c, j->reduce ? 0 : j->run_b * tokens, sizeof(panel_row)),
            .h = kt_carve(&c, KT_M_BLOCK, sizeof(panel_h)),
            .row = kt_carve(&c, j->k_hidden, sizeof(uint16_t)),
            .kernel = kt_carve(&c, l->kernel_scratch_bytes, 1),
        };
        if (base) j->workers[i] = w;
    }
    return c.used;
}

/* The next run of items, `longest` at most: [*first, end). Neighbours are neighbours in memory, so that what a kernel prefetches
 * beyond its panel is the same worker's next; runs shrink towards the end, so that all workers end together. Tests force uneven
 * ones. */
static size_t grab(counter *c, size_t items, size_t workers, size_t longest, size_t *first) {
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

/* Rows in equal blocks of at most KT_M_BLOCK, and of whole tiles but for the last. */
static size_t block_rows(size_t left) {
    const size_t blocks = (left + KT_M_BLOCK - 1) / KT_M_BLOCK;
    return blocks == 1 ? left : kt_round_up((left + blocks - 1) / blocks, KT_TILE_ROWS);
}

static void gate_up(const job *j, const worker_scratch *s, const group *g, size_t panel) {
    const kt_layer *l = j->layer;
    const kt_expert *e = &l->experts[g->expert];
    const kt_rows *rows = e->down.kernel->rows;
    const bool put_h = rows->encode || rows->tiled;
    const size_t columns = l->intermediate - panel * KT_PANEL;
    for (size_t i = 0, m; i < g->count; i += m) {
        m = block_rows(g->count - i);
        const size_t row = g->first + i;
        kt_dot dot = {
            .x = j->x[e->gate.x_kind].x + row,
            .m = m,
            .k = j->k_hidden,
            .w = {e->gate.data + panel * e->gate.panel_bytes, e->up.data + panel * e->up.panel_bytes},
            .panels = 2,
            .group = e->gate.group,
            .codebook = e->gate.codebook,
            .out = {*s->g, *s->u},
            .scratch = s->kernel,
        };
        if (e->gate.kernel == e->up.kernel && e->gate.codebook == e->up.codebook && e->gate.group == e->up.group) {
            multiply(&dot, e->gate.kernel);
        } else {
            dot.panels = 1;
            multiply(&dot, e->gate.kernel);
            dot.x = j->x[e->up.x_kind].x + row;
            dot.w[0] = dot.w[1];
            dot.out[0] = dot.out[1];
            dot.group = e->up.group;
            dot.codebook = e->up.codebook;
            multiply(&dot, e->up.kernel);
        }
        uint16_t *h = (uint16_t *)(j->h + row * j->h_stride_bytes) + panel * KT_PANEL;
        l->isa->activate(&(kt_activate){
            .g = *s->g,
            .u = *s->u,
            .bias_g = e->gate.bias ? e->gate.bias + panel * KT_PANEL : NULL,
            .bias_u = e->up.bias ? e->up.bias + panel * KT_PANEL : NULL,
            .r = l->router_weight == KT_DOWN_INPUT ? j->route.slot_weight + row : NULL,
            .m = m,
            .columns = columns < KT_PANEL ? columns : KT_PANEL,
            .act = l->act,
            .h = put_h ? *s->h : h,
            .h_stride = put_h ? KT_PANEL : j->h_stride_bytes / sizeof *h,
        });
        const size_t first = panel * KT_PANEL, left = j->k_inter - first, count = left < KT_PANEL ? left : KT_PANEL;
        for (size_t r = row; put_h && r < row + m; r++)
            kt_row_put(rows, s->h[r - row], first, count, j->k_inter, j->together[r], (void *)j->h_rows[r]);
    }
}

/* d of one panel, or of two neighbours, into s->g and s->u: two streams of weights are read faster than one. */
static void down(const job *j, const worker_scratch *s, const group *g, size_t panel, size_t panels, size_t row, size_t m) {
    const kt_matrix *w = &j->layer->experts[g->expert].down;
    panel_row *const d[2] = {s->g, s->u};
    const kt_dot dot = {
        .x = j->h_rows + row,
        .m = m,
        .k = j->k_inter,
        .w = {w->data + panel * w->panel_bytes, w->data + (panel + panels - 1) * w->panel_bytes},
        .panels = panels,
        .group = w->group,
        .codebook = w->codebook,
        .out = {*d[0], *d[1]},
        .scratch = s->kernel,
    };
    multiply(&dot, w->kernel);
    for (size_t p = 0; w->bias && p < panels; p++)
        for (size_t i = 0; i < m; i++)
            for (size_t c = 0; c < KT_PANEL; c++) d[p][i][c] += w->bias[(panel + p) * KT_PANEL + c];
}

/* y += r * d, each rounded: the one order of both forms of phase B. */
static void add(float *restrict y, const float *restrict d, float r) {
    for (size_t c = 0; c < KT_PANEL; c++) y[c] += r * d[c];
}

static float output_weight(const job *j, size_t slot) {
    return j->layer->router_weight == KT_DOWN_OUTPUT ? j->route.slot_weight[slot] : 1.0f;
}

static void store(const job *j, size_t token, size_t panel, const float *restrict y) {
    const size_t hidden = j->layer->hidden, first = panel * KT_PANEL, left = hidden - first;
    const size_t columns = left < KT_PANEL ? left : KT_PANEL, at = token * hidden + first;
    if (j->batch.dtype == KT_F32) {
        memcpy((float *)j->batch.y + at, y, columns * sizeof *y);
        return;
    }
    uint16_t *restrict to = (uint16_t *)j->batch.y + at;
    for (size_t c = 0; c < columns; c++) to[c] = kt_bf16_from_f32(y[c]);
}

static void panels_of_y(const job *j, const worker_scratch *s, size_t first, size_t end) {
    const size_t tokens = j->batch.tokens;
    memset(s->slab, 0, (end - first) * tokens * sizeof *s->slab);
    for (size_t n = 0; n < j->route.num_groups; n++) {
        const group *g = &j->route.groups[n];
        for (size_t i = 0, m; i < g->count; i += m) {
            m = block_rows(g->count - i);
            const size_t row = g->first + i;
            for (size_t panel = first, panels; panel < end; panel += panels) {
                panels = panel + 1 < end ? 2 : 1;
                panel_row *slab = s->slab + (panel - first) * tokens;
                down(j, s, g, panel, panels, row, m);
                for (size_t r = 0; r < m; r++) {
                    panel_row *y = slab + j->route.slot_token[row + r];
                    const float weight = output_weight(j, row + r);
                    add(*y, s->g[r], weight);
                    if (panels == 2) add(y[tokens], s->u[r], weight);
                }
            }
        }
    }
    for (size_t panel = first; panel < end; panel++)
        for (size_t t = 0; t < tokens; t++) store(j, t, panel, s->slab[(panel - first) * tokens + t]);
}

static panel_row *d_row(const job *j, size_t slot, size_t panel) { return (panel_row *)j->d + slot * j->hidden_panels + panel; }

static void add_up_panel(const job *j, size_t panel) {
    for (size_t t = 0; t < j->batch.tokens; t++) {
        panel_row y = {0};
        for (size_t s = 0; s < j->route.token_count[t]; s++) {
            const size_t slot = j->route.token_slots[t * j->batch.top_k + s];
            add(y, *d_row(j, slot, panel), output_weight(j, slot));
        }
        store(j, t, panel, y);
    }
}

static void part_of_d(const job *j, const worker_scratch *s, const group *g, size_t panel, size_t panels) {
    for (size_t i = 0, m; i < g->count; i += m) {
        m = block_rows(g->count - i);
        down(j, s, g, panel, panels, g->first + i, m);
        for (size_t r = 0; r < m; r++) {
            memcpy(d_row(j, g->first + i + r, panel), s->g[r], sizeof(panel_row));
            if (panels == 2) memcpy(d_row(j, g->first + i + r, panel + 1), s->u[r], sizeof(panel_row));
        }
    }
    for (size_t p = panel; p < panel + panels; p++)
        if (atomic_fetch_add_explicit(&j->arrived[p], 1, memory_order_acq_rel) + 1 == j->route.num_groups) add_up_panel(j, p);
}

static void work(void *context, size_t worker, size_t workers) {
    job *j = context;
    const worker_scratch *s = &j->workers[worker];
    const route *r = &j->route;
    if (j->layer->isa->enter) j->layer->isa->enter();
    bool staged = false;
    for (const x_kind *x = j->x; x < j->x + j->x_kinds; x++) {
        if (!x->stage) continue;
        kt_x_stage(&j->source, x, worker, workers, s->row);
        staged = true;
    }
    if (staged) kt_pool_barrier();
    size_t first, end;
    const size_t items_a = r->num_groups * j->inter_panels;
    while ((end = grab(&j->a, items_a, workers, LONGEST_RUN, &first)) > first)
        for (size_t i = first; i < end; i++) gate_up(j, s, &r->groups[r->by_cost[i / j->inter_panels]], i % j->inter_panels);
    kt_pool_barrier();
    const size_t items_b = j->hidden_panels * (j->reduce ? r->num_groups : 1);
    while ((end = grab(&j->b, items_b, workers, j->run_b, &first)) > first) {
        if (!j->reduce) panels_of_y(j, s, first, end);
        for (size_t i = first, panels; j->reduce && i < end; i += panels) {
            const size_t panel = i % j->hidden_panels;
            panels = i + 1 < end && panel + 1 < j->hidden_panels ? 2 : 1;
            part_of_d(j, s, &r->groups[r->by_cost[i / j->hidden_panels]], panel, panels);
        }
    }
    if (j->layer->isa->leave) j->layer->isa->leave();
}

static int chunk(job *j) {
    route *r = &j->route;
    kt_route_fill(r, &j->batch, j->layer->num_experts);
    j->source = (x_source){j->layer, &j->batch, r, j->together, j->k_hidden};
    if (!r->num_slots) {
        memset(j->batch.y, 0, j->batch.tokens * j->layer->hidden * (j->batch.dtype == KT_F32 ? 4 : 2));
        return 0;
    }
    for (const group *g = r->groups; g < r->groups + r->num_groups; g++)
        for (size_t i = 0; i < g->count; i++) {
            const size_t left = g->count - i / KT_TILE_ROWS * KT_TILE_ROWS;
            j->together[g->first + i] = left < KT_TILE_ROWS ? (uint8_t)left : KT_TILE_ROWS;
            j->h_rows[g->first + i] = kt_row_of(j->layer->experts[g->expert].down.kernel->rows, j->h, j->h_stride_bytes, g, i);
        }
    bool used[KT_X_KINDS] = {false}; /* by an expert that has rows */
    for (const group *g = r->groups; g < r->groups + r->num_groups; g++)
        used[j->layer->experts[g->expert].gate.x_kind] = used[j->layer->experts[g->expert].up.x_kind] = true;
    for (size_t kind = 0; kind < j->x_kinds; kind++) {
        j->x[kind].stage = false;
        if (used[kind]) kt_x_point(&j->source, &j->x[kind]);
    }
    memset((void *)j->arrived, 0, j->hidden_panels * sizeof *j->arrived);
    j->a.next = j->b.next = 0;
    return kt_pool_run(work, j);
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
        .k_inter = kt_round_up(l->intermediate, KT_GROUP),
        .hidden_panels = kt_round_up(l->hidden, KT_PANEL) / KT_PANEL,
        .inter_panels = kt_round_up(l->intermediate, KT_PANEL) / KT_PANEL,
    };
    for (; j.x_kinds < KT_X_KINDS && l->x_rows[j.x_kinds]; j.x_kinds++) {
        const kt_rows *rows = l->x_rows[j.x_kinds];
        j.x[j.x_kinds] = (x_kind){
            .rows = rows,
            .by_slot = rows->tiled || l->router_weight == KT_EXPERT_INPUT,
            .stride_bytes = kt_row_bytes(rows->group_bytes, j.k_hidden),
        };
    }
    j.h_stride_bytes = kt_row_bytes(l->h_group_bytes, j.inter_panels * KT_PANEL); /* whole panels are written */

    size_t most = batch->tokens; /* a chunk's */
    while (most > 1 && lay_out(&j, NULL, most) > kt_moe_tuning.scratch_bytes) most = (most + 1) / 2;
    const size_t bytes = lay_out(&j, NULL, most);
    if (bytes > arena.bytes) {
        kt_os_unmap(arena.base, arena.bytes);
        arena.base = kt_os_map(bytes);
        arena.bytes = arena.base ? bytes : 0;
        if (!arena.base) return ENOMEM;
    }
    lay_out(&j, arena.base, most);
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
