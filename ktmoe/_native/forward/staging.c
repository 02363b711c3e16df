/* Dealing the rows that are staged. */
#include "forward/staging.h"

#include "base/os.h"
#include "forward/tuning.h"

void kt_staging_begin(kt_staging *s, size_t rows) {
    s->rows = rows;
    s->next.value = 0;
    kt_gate_close(&s->left, (uint32_t)rows);
}

bool kt_staging_take(kt_staging *s, size_t workers, kt_run *rows) {
    const size_t share = s->rows / (KT_RUNS_LEFT * workers), count = share ? share : 1;
    const size_t first = atomic_fetch_add_explicit(&s->next.value, (uint32_t)count, memory_order_relaxed);
    *rows = (kt_run){first, first + count < s->rows ? first + count : s->rows};
    return first < s->rows;
}

void kt_staging_done(kt_staging *s, kt_run rows) {
    kt_gate_pass(&s->left, (uint32_t)(rows.end - rows.first));
    if (kt_moe_tuning.by_turns) kt_os_yield();
}
