/* What a replay computes: which experts run now, the forward calls, the sum with what was deferred. Nothing is allocated. */
#include <errno.h>
#include <math.h>
#include <string.h>

#include "base/cpu.h"
#include "base/numbers.h"
#include "base/pool.h"
#include "captured/record.h"

enum { QUIET_NAN = 0x7FC0 };

static size_t slots(const kt_record *r) { return r->batch.tokens * r->batch.top_k; }
static size_t numbers(const kt_record *r) { return r->batch.tokens * r->experts->layer.hidden; }

/* Whether weight i comes before weight j: greater, of equal ones the first; a NaN comes last. */
static bool before(const float *weights, size_t i, size_t j) {
    const bool greater = isnan(weights[j]) ? !isnan(weights[i]) : weights[i] > weights[j];
    const bool smaller = isnan(weights[i]) ? !isnan(weights[j]) : weights[j] > weights[i];
    return greater || (!smaller && i < j);
}

static void mark_urgent(const kt_record *r) {
    const kt_record_scratch *s = &r->scratch;
    const size_t num_experts = r->experts->layer.num_experts, top_k = r->batch.top_k;
    memset(s->urgent, 0, num_experts);
    for (size_t t = 0; t < r->batch.tokens; t++) {
        const float *weights = r->batch.weights + t * top_k;
        for (size_t j = 0; j < top_k; j++) {
            size_t rank = 0;
            for (size_t i = 0; i < top_k; i++) rank += before(weights, i, j);
            const int64_t id = s->ids[t * top_k + j];
            if (rank < r->urgent_slots && id >= 0 && (size_t)id < num_experts) s->urgent[id] = 1;
        }
    }
}

/* Which slots run now and which later; -1 where a slot is in the other one or in neither. A token's slots with so many greatest
 * weights, of equal ones the first, run now, and so does any expert of such a slot in all tokens. Experts on the GPU are in
 * neither. False: nothing is deferred. */
static bool split(const kt_record *r) {
    const kt_record_scratch *s = &r->scratch;
    const bool all = !r->late || r->urgent_slots >= r->batch.top_k;
    bool defers = false;
    if (!all) mark_urgent(r);
    for (size_t i = 0; i < slots(r); i++) {
        const int64_t id = s->ids[i];
        s->now[i] = s->later[i] = -1;
        if (id < 0 || (size_t)id >= r->experts->layer.num_experts || s->on_gpu[id]) continue;
        const bool later = !all && !s->urgent[id];
        (later ? s->later : s->now)[i] = id;
        defers |= later;
    }
    return defers;
}

static void spoil(uint16_t *to, const kt_record *r) { /* nobody takes it for a result */
    for (size_t i = 0; i < numbers(r); i++) to[i] = QUIET_NAN;
}

static enum kt_outcome forward(const kt_record *r, const kt_batch *batch, int *error) {
    const kt_experts *e = r->experts;
    enum kt_outcome outcome = KT_DONE;
    kt_pool_lock();
    if (!e->layer.shards)
        outcome = KT_CLOSED;
    else if (!kt_experts_intact(e))
        outcome = KT_FILE_CHANGED;
    else if (e->missing)
        outcome = KT_INCOMPLETE;
    else if ((*error = kt_moe_forward(&e->layer, batch)))
        outcome = KT_FAILED;
    kt_pool_unlock();
    return outcome;
}

/* What was deferred was rounded to bf16; the sum is in fp32 and is rounded once more. */
static enum kt_outcome add(const kt_record *r, kt_batch batch, int *error) {
    const kt_record_scratch *s = &r->scratch;
    const uint16_t *deferred = r->earlier->late;
    uint16_t *y = r->batch.y;
    batch.y = s->y;
    batch.y_dtype = KT_F32;
    const enum kt_outcome outcome = forward(r, &batch, error);
    if (outcome != KT_DONE) return outcome;
    const unsigned state = kt_fp_enter();
    for (size_t i = 0; i < numbers(r); i++) y[i] = kt_bf16_from_f32(s->y[i] + kt_bf16_to_f32(deferred[i]));
    kt_fp_leave(state);
    return KT_DONE;
}

enum kt_outcome kt_record_now(kt_record *r, bool *defers, int *error) {
    const kt_record_scratch *s = &r->scratch;
    memcpy(s->ids, r->batch.ids, slots(r) * sizeof *s->ids); /* once: a replay that nobody waits for may be overtaken */
    memcpy(s->on_gpu, r->on_gpu, r->experts->layer.num_experts);
    r->pending = false; /* what an earlier call deferred, if nobody has taken it */
    *defers = split(r);
    kt_batch batch = r->batch;
    batch.ids = s->now;
    const bool due = r->earlier && r->earlier->pending;
    const enum kt_outcome outcome = due ? add(r, batch, error) : forward(r, &batch, error);
    if (due) r->earlier->pending = false;
    if (outcome != KT_DONE) spoil(r->batch.y, r);
    return outcome;
}

enum kt_outcome kt_record_late(kt_record *r, int *error) {
    kt_batch batch = r->batch;
    batch.ids = r->scratch.later;
    batch.y = r->late;
    const enum kt_outcome outcome = forward(r, &batch, error);
    if (outcome != KT_DONE) spoil(r->late, r);
    r->pending = true;
    return outcome;
}
