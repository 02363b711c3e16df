/* What a worker does of a forward pass, under one pool dispatch.
 *
 * SHAPES      x [tokens][hidden], ids and weights [tokens][top_k], y [tokens][hidden]; slots as in route.h
 * REGULARITIES the thread count and the rest of the batch decide only in which order independent items run, and which of
 *             two functions with equal bits computes them; every sum has one order.
 * SHARDS      Each has some of h's columns, and so some of down's k. Its own threads compute and keep its sums. Whoever finishes the
 *             last shard's sums of a panel adds them all up, in the shards' order. x is staged once, for all.
 * WAITING     Only for x that is staged, and in phase B for the pieces whose h is not there yet; with an adapter, for its T (low_rank.c).
 */
#include "base/pool.h"
#include "forward/low_rank.h"
#include "forward/tuning.h"

static void stage(kt_job *j, const kt_worker *me) {
    const kt_shard_job *p = &j->shards[me->teams->groups[me->group].shard];
    uint16_t *row = p->workers[me->index - p->team->first].row;
    for (kt_run run; kt_staging_take(&j->staging, me->teams->workers, &run); kt_staging_done(&j->staging, run)) {
        size_t before = 0; /* rows of the forms before */
        for (const kt_x_form *form = j->forms; form < j->forms + j->num_forms; form++) {
            const size_t rows = kt_x_rows(&j->x, form), from = run.first > before ? run.first - before : 0;
            if (run.end > before) kt_x_stage(&j->x, form, from, run.end - before < rows ? run.end - before : rows, row);
            before += rows;
        }
    }
    kt_staging_wait(&j->staging);
}

void kt_phases(void *context, const kt_worker *me) {
    kt_job *j = context;
    if (j->layer->isa->enter) j->layer->isa->enter();
    if (kt_moe_tuning.by_turns) {
        kt_gate_pass(&j->begun, 1);
        kt_gate_wait(&j->begun);
    }
    if (j->staging.rows) stage(j, me);
    const bool adapted = j->batch.adapter, sums = kt_sums(j);
    if (adapted) kt_lower_rows(j, me, KT_PHASE_A);
    kt_worker_job work[KT_SHARDS_MAX];
    for (size_t i = 0; i < j->num_shards; i++) {
        if (!kt_serves(me, i)) continue;
        kt_shard_job *p = &j->shards[i];
        work[i] = (kt_worker_job){.job = j, .shard = p, .scratch = &p->workers[me->index - p->team->first]};
        for (size_t phase = 0; phase < KT_PHASES; phase++) work[i].lists[phase] = kt_hand_of(&p->lists->of[phase], me);
        kt_phase_a(&work[i]);
        if (sums && !adapted) kt_phase_b(&work[i]);
    }
    if (adapted) kt_lower_rows(j, me, KT_PHASE_B);
    for (size_t i = 0; sums && adapted && i < j->num_shards; i++)
        if (kt_serves(me, i)) kt_phase_b(&work[i]);
    if (j->layer->isa->leave) j->layer->isa->leave();
}
