/* What an adapter adds to products; low_rank.c has the words. */
#ifndef KT_LOW_RANK_H
#define KT_LOW_RANK_H

#include "forward/job.h"

/* Computes each strip's T before a phase. With the last one, what is kept of T is written. */
void kt_lower_rows(kt_job *j, const kt_worker *me, kt_phase before);

/* Rows [row, row + m) of an expert, columns [first, first + columns) of a matrix, at most KT_PANEL. */
typedef struct kt_adding {
    size_t matrix, expert, row, m, first, columns;
} kt_adding;

/* What an adapter adds, fp32 [m][KT_PANEL], in the worker's place for one of two panels; NULL: nothing is added. */
const float *kt_added(const kt_job *j, const kt_worker_scratch *s, const kt_adding *of, size_t panel);

#endif
