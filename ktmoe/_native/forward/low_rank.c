/* What an adapter adds to g, u and d: T B^T with T = scale * (rows A^T), where rows are the bf16 ones that enter a matrix.
 *
 * SHAPES       x, h [slots][k], A [rank][k], T [slots][rank], B [n][rank]
 * REGULARITIES all in fp32. A row's T is one sum over k, which dense_rows() orders within KT_LOWERED_INPUTS of them, and shards follow one
 *              another; what is added is one sum over the rank. Nothing depends on the batch.
 * WAITING      T of x is there before phase A, T of h between the phases.
 */
#include <string.h>

#include "forward/low_rank.h"
#include "forward/tuning.h"

/* Rows [rank][k] of an adapter's A, from number `at` on. */
typedef struct lowering {
    const kt_isa *isa;
    const kt_low_rank *a;
    size_t at, stride, rank, k;
} lowering;

/* t = or += x A^T, not scaled yet. */
static void lower(const lowering *l, const float *x, size_t m, bool add, float *t, float *scratch) {
    for (size_t first = 0; first < l->k; first += KT_LOWERED_INPUTS) {
        const size_t k = l->k - first < KT_LOWERED_INPUTS ? l->k - first : KT_LOWERED_INPUTS;
        const kt_wide a = kt_widened(l->isa, l->a, l->at + first, l->stride, l->rank, k, scratch);
        l->isa->dense_rows(&(kt_dense_rows){
            .a = x + first,
            .b = a.at,
            .a_row = l->k,
            .b_row = a.stride,
            .c = t,
            .c_row = l->rank,
            .m = m,
            .n = l->rank,
            .k = k,
            .add = add || first,
        });
    }
}

static void scale(float *t, size_t count, float by) {
    for (size_t i = 0; i < count; i++) t[i] = by * t[i];
}

/* Computes T of gate and up for rows of one expert. */
static void lower_x(kt_job *j, const kt_worker_scratch *s, const kt_strip *strip) {
    const kt_layer *l = j->layer;
    const kt_adapter *adapter = j->batch.adapter;
    const size_t expert = j->route.pieces[strip->piece].expert, end = strip->first + strip->rows;
    for (size_t row = strip->first, m; row < end; row += m) {
        m = end - row < KT_TILE_ROWS ? end - row : KT_TILE_ROWS;
        for (size_t r = 0; r < m; r++) {
            const uint16_t *x = kt_x_row(&j->x, j->route.slot_token[row + r], j->route.slot_weight[row + r], s->row);
            l->isa->widen(x, s->wide + r * l->hidden, l->hidden);
        }
        for (size_t p = KT_OF_GATE; p <= KT_OF_UP; p++) {
            if (!adapter->of[p].a.data) continue;
            const lowering of = {l->isa,    &adapter->of[p].a, expert * adapter->rank * l->hidden,
                                 l->hidden, adapter->rank,     l->hidden};
            float *t = j->t[p] + row * adapter->rank;
            lower(&of, s->wide, m, false, t, s->low);
            scale(t, m * adapter->rank, adapter->scale);
        }
    }
}

/* Computes T of down for rows of one expert, whose h is awaited. */
static void lower_h(kt_job *j, const kt_worker_scratch *s, const kt_strip *strip) {
    const kt_isa *isa = j->layer->isa;
    const kt_adapter *adapter = j->batch.adapter;
    const size_t expert = j->route.pieces[strip->piece].expert, end = strip->first + strip->rows, all = j->intermediate;
    for (size_t i = 0; i < j->num_shards; i++) kt_gate_wait(&j->shards[i].gates[strip->piece]);
    for (size_t row = strip->first, m; row < end; row += m) {
        m = end - row < KT_TILE_ROWS ? end - row : KT_TILE_ROWS;
        float *t = j->t[KT_OF_DOWN] + row * adapter->rank;
        for (size_t i = 0; i < j->num_shards; i++) {
            const kt_shard *own = j->shards[i].shard;
            isa->widen(j->shards[i].bf16_h + row * own->intermediate, s->wide, m * own->intermediate);
            const lowering of = {isa,           &adapter->of[KT_OF_DOWN].a, expert * adapter->rank * all + own->first, all,
                                 adapter->rank, own->intermediate};
            lower(&of, s->wide, m, i > 0, t, s->low);
        }
        scale(t, m * adapter->rank, adapter->scale);
    }
}

static void keep_t(kt_job *j, const kt_strip *strip) {
    const size_t rank = j->batch.adapter->rank;
    for (size_t slot = strip->first; slot < strip->first + strip->rows; slot++)
        for (size_t p = 0; p < KT_MATRICES; p++) {
            float *to = j->batch.kept.t + (j->route.slot_row[slot] * KT_MATRICES + p) * rank;
            if (j->batch.adapter->of[p].a.data)
                memcpy(to, j->t[p] + slot * rank, rank * sizeof *to);
            else
                memset(to, 0, rank * sizeof *to);
        }
}

/* Whoever is there takes strips; nobody goes on before all are done. */
void kt_lower_rows(kt_job *j, const kt_worker *me, kt_phase before) {
    const kt_shard_job *p = &j->shards[me->teams->groups[me->group].shard];
    const kt_worker_scratch *s = &p->workers[me->index - p->team->first];
    kt_lowered *l = &j->lowered[before];
    for (size_t i; (i = atomic_fetch_add_explicit(&l->next.value, 1, memory_order_relaxed)) < j->schedule.num_strips;) {
        const kt_strip *strip = &j->schedule.strips[i];
        if (before == KT_PHASE_A)
            lower_x(j, s, strip);
        else if (j->batch.adapter->of[KT_OF_DOWN].a.data)
            lower_h(j, s, strip);
        if (before == KT_PHASE_B && j->batch.kept.t) keep_t(j, strip);
        kt_gate_pass(&l->left, 1);
        if (kt_moe_tuning.by_turns) kt_os_yield();
    }
    kt_gate_wait(&l->left);
}

const float *kt_added(const kt_job *j, const kt_worker_scratch *s, const kt_adding *of, size_t panel) {
    const kt_adapter *adapter = j->batch.adapter;
    if (!adapter || !adapter->of[of->matrix].b.data) return NULL;
    const size_t rank = adapter->rank;
    float *to = *s->added[panel];
    const size_t n = of->matrix == KT_OF_DOWN ? j->layer->hidden : j->intermediate;
    const size_t at = (of->expert * n + of->first) * rank;
    const kt_wide b = kt_widened(j->layer->isa, &adapter->of[of->matrix].b, at, rank, of->columns, rank, s->low);
    if (of->columns < KT_PANEL) memset(to, 0, of->m * sizeof(kt_panel_row));
    j->layer->isa->dense_rows(&(kt_dense_rows){
        .a = j->t[of->matrix] + of->row * rank,
        .b = b.at,
        .a_row = rank,
        .b_row = b.stride,
        .c = to,
        .c_row = KT_PANEL,
        .m = of->m,
        .n = of->columns,
        .k = rank,
    });
    return to;
}
