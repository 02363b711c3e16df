/* A layer's call that is part of a CUDA graph: what a replay computes, in memory that was there when the graph was captured. */
#ifndef KT_RECORD_H
#define KT_RECORD_H

#include "base/event.h"
#include "forward/forward.h"
#include "layer/experts.h"

/* Memory of one worker at a time; records may share it. */
typedef struct kt_record_scratch {
    int64_t *ids, *now, *later; /* [tokens][top_k]: as they are when the call begins; which of them run now, and which later */
    uint8_t *on_gpu, *urgent;   /* [num_experts] */
    float *y;                   /* [tokens][hidden], for a sum with what was deferred */
} kt_record_scratch;

typedef struct kt_record {
    const kt_experts *experts;
    kt_batch batch;            /* bf16; the graph copies x, ids and weights there, and y from there */
    const uint8_t *on_gpu;     /* [num_experts]; to be skipped. Read once in each call */
    size_t urgent_slots;       /* so many of a token's slots are not deferred */
    uint16_t *late;            /* bf16 [tokens][hidden], what deferred experts give; NULL: none is deferred */
    bool pending;              /* late is still to be added by the record whose `earlier` this is */
    struct kt_record *earlier; /* NULL: none */
    kt_record_scratch scratch;
    /* The fields of the queue (queue.c). */
    struct kt_record *next;
    uint32_t submitted;      /* how many times */
    kt_event finished;       /* what `submitted` was when the last call began whose y is there */
    enum kt_outcome outcome; /* KT_DONE, or how a call failed since somebody asked */
    int error;               /* an errno, of KT_FAILED */
} kt_record;

/* What of a call runs now, and what is deferred. They return KT_DONE, or how they failed: y, or late, is NaN then. */
enum kt_outcome kt_record_now(kt_record *r, bool *defers, int *error);
enum kt_outcome kt_record_late(kt_record *r, int *error);

#endif
