/* Packing and unpacking by the pool: an expert's panels are dealt in runs, each shard's to its own threads, which so are the first
 * to touch its memory. */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/numbers.h"
#include "base/pool.h"
#include "base/stream.h"
#include "ktmoe.h"
#include "pack/groups.h"

typedef struct pack_job {
    size_t shards;
    const kt_shard_matrix *matrices;
    const kt_slice *slices;
    size_t num_slices;
    struct next {
        _Alignas(64) _Atomic size_t panel; /* of all matrices, one after another */
    } next[KT_SHARDS_MAX];
    _Atomic uint8_t low[KT_MATRICES], high[KT_MATRICES];
    _Atomic bool negative[KT_MATRICES], refused[KT_MATRICES];
    _Atomic int error;
} pack_job;

static size_t panels_of(const kt_shard_matrix *s) { return s->format ? kt_round_up(s->n, KT_PANEL) / KT_PANEL : 0; }

size_t kt_packed_bytes(const kt_shard_matrix *m) { return panels_of(m) * kt_panel_bytes(m->format, m->k); }

/* A worker takes a run of panels; so many such runs each worker may still expect. Neighbours are neighbours in the checkpoint,
 * too, so that what is fetched beyond a panel is the same worker's next one. */
enum { RUNS_LEFT = 2 };

/* The next run of a shard's panels, of all matrices one after another: [*first, end). */
static size_t grab(pack_job *j, size_t shard, const kt_worker *me, size_t *first) {
    size_t panels = 0;
    for (size_t m = 0; m < KT_MATRICES; m++) panels += panels_of(&j->matrices[shard * KT_MATRICES + m]);
    const size_t seen = atomic_load(&j->next[shard].panel), left = seen < panels ? panels - seen : 0;
    const size_t run = left / (RUNS_LEFT * me->teams->of[shard].size) + 1;
    *first = atomic_fetch_add(&j->next[shard].panel, run);
    return *first + run < panels ? *first + run : panels;
}

/* The matrix that has a panel of that number among all of its shard; *panel becomes the number in the matrix. */
static size_t matrix_of(const pack_job *j, size_t shard, size_t *panel) {
    size_t matrix = 0;
    for (size_t panels; *panel >= (panels = panels_of(&j->matrices[shard * KT_MATRICES + matrix])); matrix++) *panel -= panels;
    return matrix;
}

/* The bytes from one dense row of codes to the next. They are no power of two, since the lines of 16 rows would have the same
 * places in L1. */
static size_t dense_stride(const kt_format *f, size_t k) { return kt_round_up(kt_codes_bytes(f, k), KT_LINE) + KT_LINE; }

/* Allocates the bytes for a panel's dense codes and arrays of groups, once for all panels of a worker, since pages cost more
 * than what is done in them. To pack, only codes in another order need it. False: there is no memory. */
static bool dense_panel(pack_job *j, bool unpacks, uint8_t **dense) {
    size_t most = 0;
    for (const kt_shard_matrix *s = j->matrices; s < j->matrices + j->shards * KT_MATRICES; s++) {
        if (!s->format || !(unpacks || s->format->order.moved)) continue;
        const kt_format *f = s->format;
        size_t row = dense_stride(f, s->k);
        for (size_t i = 0; i < KT_GROUP_ARRAYS; i++) row += kt_group_bytes(&f->groups[i], s->k);
        most = KT_PANEL * row > most ? KT_PANEL * row : most;
    }
    *dense = most ? malloc(most) : NULL;
    if (*dense || !most) return true;
    atomic_store(&j->error, ENOMEM);
    return false;
}

static size_t rows_of(const kt_shard_matrix *s, size_t panel) {
    const size_t left = s->n - panel * KT_PANEL;
    return left < KT_PANEL ? left : KT_PANEL;
}

static void pack_panel(const kt_shard_matrix *s, size_t panel, uint8_t *dense, kt_scan *scan) {
    const kt_format *f = s->format;
    const size_t row = s->row + panel * KT_PANEL, count = rows_of(s, panel);
    uint8_t *packed = s->packed + panel * kt_panel_bytes(f, s->k);
    size_t stride = kt_codes_bytes(f, s->stored.k);
    const uint8_t *rows = s->stored.codes + row * stride + kt_codes_bytes(f, s->column);
    if (f->order.moved) {
        stride = dense_stride(f, s->k);
        const kt_rectangle r = {s->stored.n, s->stored.k, row, count, s->column, s->k};
        kt_order_to_rows(&f->order, s->stored.codes, r, dense, stride);
        if (s->stored.fields) scan->refused |= kt_fields_read(&f->order.records, s->stored.fields, s->stored.codes, r);
        rows = dense;
    }
    scan->refused |= !f->packing->pack_codes(s, rows, stride, count, packed);
    kt_pack_headers(s, panel, packed, scan);
}

static void pack_panels(void *context, const kt_worker *me) {
    pack_job *j = context;
    kt_scan scans[KT_MATRICES];
    uint8_t *dense;
    if (!dense_panel(j, false, &dense)) return;
    for (size_t m = 0; m < KT_MATRICES; m++) scans[m] = (kt_scan){.low = 255};
    for (size_t shard = 0; shard < j->shards; shard++)
        for (size_t first, end; kt_serves(me, shard) && (end = grab(j, shard, me, &first)) > first;)
            for (size_t i = first; i < end; i++) {
                size_t panel = i;
                const size_t m = matrix_of(j, shard, &panel);
                pack_panel(&j->matrices[shard * KT_MATRICES + m], panel, dense, &scans[m]);
            }
    kt_streamed();
    free(dense);
    for (size_t m = 0; m < KT_MATRICES; m++) {
        uint8_t seen = atomic_load(&j->low[m]);
        while (scans[m].low < seen && !atomic_compare_exchange_weak(&j->low[m], &seen, scans[m].low)) continue;
        seen = atomic_load(&j->high[m]);
        while (scans[m].high > seen && !atomic_compare_exchange_weak(&j->high[m], &seen, scans[m].high)) continue;
        if (scans[m].negative) atomic_store(&j->negative[m], true);
        if (scans[m].refused) atomic_store(&j->refused[m], true);
    }
}

int kt_pack(const kt_placement *placement, const kt_shard_matrix *matrices, kt_scan *scans) {
    pack_job j = {.shards = kt_shards_of(placement), .matrices = matrices};
    for (size_t m = 0; m < KT_MATRICES; m++) j.low[m] = 255;
    const int error = kt_pool_run(pack_panels, &j, placement);
    for (size_t m = 0; m < KT_MATRICES; m++) scans[m] = (kt_scan){j.low[m], j.high[m], j.negative[m], j.refused[m]};
    return error ? error : j.error;
}

size_t kt_codes_bytes(const kt_format *f, size_t columns) {
    return f->grid ? columns / KT_SUPER_GROUP * f->grid->record_bytes : columns * f->packing->code_bits / 8;
}

/* The bytes of so many columns in a row of an array of groups; a NULL: in a row of codes. */
static size_t row_bytes(const kt_format *f, const kt_group_array *a, size_t columns) {
    return a ? kt_group_bytes(a, columns) : kt_codes_bytes(f, columns);
}

/* The rectangle that a panel of a shard's matrix and a slice have in common. */
static kt_rectangle common(const kt_shard_matrix *s, size_t panel, const kt_slice *to) {
    const size_t row = s->row + panel * KT_PANEL, end = row + rows_of(s, panel);
    const size_t first = row > to->row ? row : to->row, last = end < to->row + to->rows ? end : to->row + to->rows;
    const size_t begin = s->column > to->column ? s->column : to->column;
    const size_t s_end = s->column + s->k, to_end = to->column + to->columns, stop = s_end < to_end ? s_end : to_end;
    return (kt_rectangle){
        to->rows, to->columns, first, last > first ? last - first : 0, begin, stop > begin ? stop - begin : 0};
}

/* Copies rows of one of a panel's dense arrays to a slice's. a: NULL for codes. */
static void copy_rows(const kt_shard_matrix *s, size_t panel, const kt_slice *to, const kt_group_array *a, const uint8_t *from,
                      uint8_t *bytes_to) {
    const kt_rectangle r = common(s, panel, to);
    const size_t from_stride = row_bytes(s->format, a, s->k), to_stride = row_bytes(s->format, a, to->columns);
    const size_t first = s->row + panel * KT_PANEL, count = row_bytes(s->format, a, r.columns), shared = a ? a->rows : 1;
    for (size_t i = r.row; i < r.row + r.rows && r.columns; i++) {
        if (i % shared) continue; /* another panel has the row that is shared */
        memcpy(bytes_to + (i - to->row) / shared * to_stride + row_bytes(s->format, a, r.column - to->column),
               from + (i - first) / shared * from_stride + row_bytes(s->format, a, r.column - s->column), count);
    }
}

static void copy_codes(const kt_shard_matrix *s, size_t panel, const kt_slice *to, const uint8_t *rows) {
    if (!s->format->order.moved) {
        copy_rows(s, panel, to, NULL, rows, to->codes);
        return;
    }
    kt_rectangle r = common(s, panel, to);
    const size_t stride = kt_codes_bytes(s->format, s->k), first = s->row + panel * KT_PANEL;
    if (!r.rows || !r.columns) return;
    rows += (r.row - first) * stride + kt_codes_bytes(s->format, r.column - s->column);
    r.row -= to->row, r.column -= to->column;
    kt_order_from_rows(&s->format->order, rows, stride, r, to->codes);
}

/* Writes a panel's fields into a slice's records; the arrays that they are made from are complete by now. */
static void write_fields(const kt_shard_matrix *s, size_t panel, const kt_slice *to) {
    kt_rectangle r = common(s, panel, to);
    if (!to->fields || !r.rows || !r.columns) return;
    r.row -= to->row, r.column -= to->column;
    kt_fields_write(&s->format->order.records, to->fields, to->codes, r);
}

static void unpack_panel(const kt_shard_matrix *s, size_t panel, const kt_slice *slices, size_t count, size_t matrix,
                         uint8_t *codes) {
    const kt_format *f = s->format;
    const size_t rows = rows_of(s, panel);
    const uint8_t *packed = s->packed + panel * kt_panel_bytes(f, s->k);
    uint8_t *groups[KT_GROUP_ARRAYS], *end = codes + rows * kt_codes_bytes(f, s->k);
    for (size_t i = 0; i < KT_GROUP_ARRAYS; end += rows * kt_group_bytes(&f->groups[i], s->k), i++) groups[i] = end;
    f->packing->unpack_codes(f, packed, rows, s->k, codes);
    kt_unpack_headers(f, packed, 0, rows, s->k, groups);
    for (const kt_slice *to = slices; to < slices + count; to++) {
        if (to->matrix != matrix) continue;
        copy_codes(s, panel, to, codes);
        for (size_t i = 0; i < KT_GROUP_ARRAYS; i++)
            if (f->groups[i].group) copy_rows(s, panel, to, &f->groups[i], groups[i], to->groups[i]);
        write_fields(s, panel, to);
    }
}

static void unpack_panels(void *context, const kt_worker *me) {
    pack_job *j = context;
    uint8_t *dense;
    if (!dense_panel(j, true, &dense)) return;
    for (size_t shard = 0; shard < j->shards; shard++)
        for (size_t first, end; kt_serves(me, shard) && (end = grab(j, shard, me, &first)) > first;)
            for (size_t i = first; i < end; i++) {
                size_t panel = i;
                const size_t m = matrix_of(j, shard, &panel);
                unpack_panel(&j->matrices[shard * KT_MATRICES + m], panel, j->slices, j->num_slices, m, dense);
            }
    free(dense);
}

int kt_unpack(const kt_placement *placement, const kt_shard_matrix *matrices, const kt_slice *slices, size_t count) {
    pack_job j = {.shards = kt_shards_of(placement), .matrices = matrices, .slices = slices, .num_slices = count};
    const int error = kt_pool_run(unpack_panels, &j, placement);
    return error ? error : j.error;
}

#define ENTRY(family) &kt_pack_##family,
const kt_packing *const kt_packings[] = {KT_FAMILIES(ENTRY) NULL};
