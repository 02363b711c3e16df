/* A layer's call that is part of a CUDA graph: what a replay computes, in memory that was there when the graph was captured. */
#ifndef KT_RECORD_H
#define KT_RECORD_H

#include "base/event.h"
#include "forward/forward.h"
#include "layer/experts.h"

/* Memory of one worker at a time; records may share it. */
typedef struct kt_record_scratch {
    int64_t *ids, *now, *later; /* [tokens][top_k]: as they are when the call begins; which of them run in which of its parts */
    uint8_t *on_gpu, *urgent;   /* [num_experts] */
    float *x, *y;               /* [tokens][hidden]; NULL where nothing is to be added */
} kt_record_scratch;

typedef struct kt_record {
    const kt_experts *experts;
    kt_batch batch;            /* all experts, bf16; x, ids and weights are copied there by the graph, y is copied from there */
    const uint8_t *on_gpu;     /* [num_experts]; to be skipped. Read once in each call */
    size_t urgent_slots;       /* kt_split()'s */
    uint16_t *late;            /* bf16 [tokens][hidden], what deferred experts give; NULL: none is deferred */
    bool pending;              /* late is still to be added by the record whose `earlier` this is */
    struct kt_record *earlier; /* NULL: none */
    kt_record_scratch scratch;
    /* The queue's (queue.c). */
    struct kt_record *next;
    uint32_t submitted;      /* how many times */
    kt_event finished;       /* what `submitted` was when the last call began whose y is there */
    enum kt_outcome outcome; /* KT_DONE, or how a call failed since somebody asked */
    int error;               /* an errno, of KT_FAILED */
} kt_record;

/* Which slots run now and which later; -1 where a slot is in the other part or in neither. A token's slots with so many greatest
 * weights, of equal ones the first, run now, and so does any expert of such a slot in all tokens. Experts on the GPU are in
 * neither. False: nothing is deferred. */
bool kt_split(const kt_record *r);

/* Both parts of a call. They return KT_DONE, or how they failed: y, or late, is NaN then. */
enum kt_outcome kt_record_now(kt_record *r, bool *defers, int *error);
enum kt_outcome kt_record_late(kt_record *r, int *error);
void kt_record_spoil(uint16_t *to, const kt_record *r); /* with NaN */

#endif
