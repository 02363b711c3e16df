/* Packing and unpacking by the pool: an expert's panels are dealt one by one, each shard's to its own threads, which so are the
 * first to touch its memory. */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/numbers.h"
#include "base/pool.h"
#include "ktmoe.h"
#include "pack/pack.h"

typedef struct pack_job {
    size_t shards;
    const kt_shard_matrix *matrices;
    const kt_slice *slices;
    size_t num_slices;
    struct next {
        _Alignas(64) _Atomic size_t panel; /* of all matrices, one after another */
    } next[KT_SHARDS_MAX];
    _Atomic uint8_t low[KT_MATRICES], high[KT_MATRICES];
    _Atomic bool refused[KT_MATRICES];
    _Atomic int error;
} pack_job;

static size_t panels_of(const kt_shard_matrix *s) { return s->format ? kt_round_up(s->n, KT_PANEL) / KT_PANEL : 0; }

size_t kt_packed_bytes(const kt_shard_matrix *m) { return panels_of(m) * m->format->packing->panel_bytes(m->format, m->k); }

/* The next panel of a shard and its matrix, or KT_MATRICES. */
static size_t grab(pack_job *j, size_t shard, size_t *panel) {
    *panel = atomic_fetch_add(&j->next[shard].panel, 1);
    size_t matrix = 0;
    for (size_t panels; matrix < KT_MATRICES && *panel >= (panels = panels_of(&j->matrices[shard * KT_MATRICES + matrix]));
         matrix++)
        *panel -= panels;
    return matrix;
}

static void pack_panels(void *context, size_t worker, size_t workers) {
    pack_job *j = context;
    kt_scan scans[KT_MATRICES];
    for (size_t m = 0; m < KT_MATRICES; m++) scans[m] = (kt_scan){.low = 255};
    for (size_t shard = worker % j->shards; shard < j->shards; shard += workers)
        for (size_t panel, m; (m = grab(j, shard, &panel)) < KT_MATRICES;) {
            const kt_shard_matrix *s = &j->matrices[shard * KT_MATRICES + m];
            const kt_packing *packing = s->format->packing;
            packing->pack(&s->stored, panel, s->packed + panel * packing->panel_bytes(s->format, s->k), &scans[m]);
        }
    for (size_t m = 0; m < KT_MATRICES; m++) {
        uint8_t seen = atomic_load(&j->low[m]);
        while (scans[m].low < seen && !atomic_compare_exchange_weak(&j->low[m], &seen, scans[m].low)) continue;
        seen = atomic_load(&j->high[m]);
        while (scans[m].high > seen && !atomic_compare_exchange_weak(&j->high[m], &seen, scans[m].high)) continue;
        if (scans[m].refused) atomic_store(&j->refused[m], true);
    }
}

int kt_pack(const kt_placement *placement, const kt_shard_matrix *matrices, kt_scan *scans) {
    pack_job j = {.shards = kt_shards_of(placement), .matrices = matrices};
    for (size_t m = 0; m < KT_MATRICES; m++) j.low[m] = 255;
    const int error = kt_pool_run(pack_panels, &j, placement);
    for (size_t m = 0; m < KT_MATRICES; m++) scans[m] = (kt_scan){j.low[m], j.high[m], j.refused[m]};
    return error;
}

size_t kt_codes_bytes(const kt_format *f, size_t columns) { return columns * f->packing->code_bits / 8; }
size_t kt_scales_bytes(const kt_format *f, size_t columns) {
    return f->scale_group ? (columns + f->scale_group - 1) / f->scale_group * f->scale_bytes : 0;
}

typedef size_t row_bytes(const kt_format *f, size_t columns);

/* What `rows` of a shard's matrix, from its row `first` on, have in common with a slice. bytes: kt_codes_bytes or kt_scales_bytes. */
static void copy_rows(const kt_shard_matrix *s, size_t first, size_t rows, const kt_slice *p, row_bytes *bytes,
                      const uint8_t *from, uint8_t *to) {
    const size_t begin = s->column > p->column ? s->column : p->column;
    const size_t s_end = s->column + s->k, p_end = p->column + p->columns, end = s_end < p_end ? s_end : p_end;
    if (begin >= end) return;
    const size_t from_stride = bytes(s->format, s->k), to_stride = bytes(s->format, p->columns);
    const size_t count = bytes(s->format, end - begin);
    for (size_t i = 0; i < rows; i++) {
        const size_t row = s->row + first + i;
        if (row < p->row || row >= p->row + p->rows) continue;
        memcpy(to + (row - p->row) * to_stride + bytes(s->format, begin - p->column),
               from + i * from_stride + bytes(s->format, begin - s->column), count);
    }
}

static void unpack_panel(const kt_shard_matrix *s, size_t panel, const kt_slice *slices, size_t count, size_t matrix,
                         uint8_t *codes) {
    const kt_packing *packing = s->format->packing;
    const size_t first = panel * KT_PANEL, rows = s->n - first < KT_PANEL ? s->n - first : KT_PANEL;
    uint8_t *scales = codes + rows * kt_codes_bytes(s->format, s->k);
    packing->unpack(s->format, s->packed + panel * packing->panel_bytes(s->format, s->k), rows, s->k, codes, scales);
    for (const kt_slice *p = slices; p < slices + count; p++) {
        if (p->matrix != matrix) continue;
        copy_rows(s, first, rows, p, kt_codes_bytes, codes, p->codes);
        if (s->format->scale_group) copy_rows(s, first, rows, p, kt_scales_bytes, scales, p->scales);
    }
}

static void unpack_panels(void *context, size_t worker, size_t workers) {
    pack_job *j = context;
    size_t most = 0;
    for (const kt_shard_matrix *s = j->matrices; s < j->matrices + j->shards * KT_MATRICES; s++) {
        const size_t bytes = s->format ? KT_PANEL * (kt_codes_bytes(s->format, s->k) + kt_scales_bytes(s->format, s->k)) : 0;
        most = bytes > most ? bytes : most;
    }
    uint8_t *dense = malloc(most); /* a panel's, once for all: pages cost more than what is done in them */
    if (!dense) {
        atomic_store(&j->error, ENOMEM);
        return;
    }
    for (size_t shard = worker % j->shards; shard < j->shards; shard += workers)
        for (size_t panel, m; (m = grab(j, shard, &panel)) < KT_MATRICES;)
            unpack_panel(&j->matrices[shard * KT_MATRICES + m], panel, j->slices, j->num_slices, m, dense);
    free(dense);
}

int kt_unpack(const kt_placement *placement, const kt_shard_matrix *matrices, const kt_slice *slices, size_t count) {
    pack_job j = {.shards = kt_shards_of(placement), .matrices = matrices, .slices = slices, .num_slices = count};
    const int error = kt_pool_run(unpack_panels, &j, placement);
    return error ? error : j.error;
}

const kt_packing *kt_packing_of(const char *family) {
    static const kt_packing *const all[] = {&kt_pack_q4, &kt_pack_b16};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!strcmp(all[i]->family, family)) return all[i];
    return NULL;
}
