/* Rows of x that the workers copy before anybody multiplies them. Whoever is there takes rows, so that nobody waits for a worker
 * that is late. */
#ifndef KT_STAGING_H
#define KT_STAGING_H

#include "base/gate.h"
#include "forward/schedule.h"

/* The most bytes that the caller stages alone, sooner than another worker would have woken up. */
enum { KT_STAGE_ALONE_BYTES = 16 << 10 };

typedef struct kt_staging {
    size_t rows; /* 0: none are left for the workers */
    kt_count next;
    kt_gate left;
} kt_staging;

void kt_staging_begin(kt_staging *s, size_t rows);
bool kt_staging_take(kt_staging *s, size_t workers, kt_run *rows); /* the next rows; false: there are no more */
void kt_staging_done(kt_staging *s, kt_run rows);
static inline void kt_staging_wait(kt_staging *s) { kt_gate_wait(&s->left); }

#endif
