/* Rows of a dense matrix, read back from its panels. A row costs the lines of its panel that it has a part in. */
#include <stdatomic.h>

#include "base/pool.h"
#include "layer/experts.h"
#include "pack/groups.h"

typedef struct rows_job {
    const kt_experts *experts;
    const kt_read_rows *to;
    _Atomic size_t next;
} rows_job;

static void read_row(const kt_experts *e, const kt_read_rows *to, size_t i) {
    const kt_format *f = &e->formats[0];
    const size_t k = e->layer.hidden;
    size_t row = (size_t)to->numbers[i], shard = 0;
    while (row >= e->memory[shard].first + e->memory[shard].count) shard++;
    row -= e->memory[shard].first;
    const kt_matrix *m = kt_matrix_of(e, shard, 0, 0);
    const size_t panel = row / KT_PANEL, column = row % KT_PANEL;
    const uint8_t *packed = m->data + panel * m->panel_bytes;
    uint8_t *groups[KT_GROUP_ARRAYS];
    for (size_t a = 0; a < KT_GROUP_ARRAYS; a++)
        groups[a] = to->groups[a] ? to->groups[a] + i * kt_group_bytes(&f->groups[a], k) : NULL;
    f->packing->unpack_row(f, packed, column, k, to->codes + i * kt_codes_bytes(f, k));
    kt_unpack_headers(f, packed, column, 1, k, groups);
    if (to->factors) to->factors[i] = m->factor[panel * m->factor_step + column];
}

static void read_rows(void *context, const kt_worker *me) {
    rows_job *j = context;
    (void)me;
    for (size_t i; (i = atomic_fetch_add(&j->next, 1)) < j->to->count;) read_row(j->experts, j->to, i);
}

enum kt_outcome kt_experts_read_rows(const kt_experts *e, const kt_read_rows *to, int *error) {
    rows_job j = {.experts = e, .to = to};
    *error = 0;
    if (!e->layer.shards) return KT_CLOSED;
    if (!kt_experts_intact(e)) return KT_FILE_CHANGED;
    if (e->missing) return KT_INCOMPLETE;
    if (to->count == 1)
        read_row(e, to, 0); /* as quickly as threads would begin */
    else if (to->count)
        *error = kt_pool_run(read_rows, &j, e->layer.placement);
    return *error ? KT_FAILED : KT_DONE;
}
