/* Packing by the pool: panels are dealt one by one, and what each thread saw of the scales is merged. */
#include <string.h>

#include "driver.h"

typedef struct pack_job {
    const kt_source *source;
    uint8_t *packed;
    size_t panels, panel_bytes;
    _Atomic size_t next;
    _Atomic uint8_t low, high;
    _Atomic bool refused;
} pack_job;

static void pack_panels(void *context, size_t worker, size_t workers) {
    (void)worker, (void)workers;
    pack_job *j = context;
    kt_scan scan = {.low = 255};
    for (size_t panel; (panel = atomic_fetch_add(&j->next, 1)) < j->panels;)
        j->source->format.packing->pack(j->source, panel, j->packed + panel * j->panel_bytes, &scan);
    uint8_t seen = atomic_load(&j->low);
    while (scan.low < seen && !atomic_compare_exchange_weak(&j->low, &seen, scan.low)) continue;
    seen = atomic_load(&j->high);
    while (scan.high > seen && !atomic_compare_exchange_weak(&j->high, &seen, scan.high)) continue;
    if (scan.refused) atomic_store(&j->refused, true);
}

int kt_pack(const kt_source *s, uint8_t *packed, kt_scan *scan) {
    pack_job j = {
        .source = s,
        .packed = packed,
        .panels = kt_round_up(s->n, KT_PANEL) / KT_PANEL,
        .panel_bytes = s->format.packing->panel_bytes(&s->format, s->k),
        .low = 255,
    };
    kt_pool_lock();
    const int error = kt_pool_run(pack_panels, &j);
    kt_pool_unlock();
    *scan = (kt_scan){j.low, j.high, j.refused};
    return error;
}

void kt_unpack(const kt_format *f, const uint8_t *packed, size_t n, size_t k, uint8_t *codes, uint8_t *scales) {
    const size_t panel_bytes = f->packing->panel_bytes(f, k);
    for (size_t panel = 0; panel * KT_PANEL < n; panel++)
        f->packing->unpack(f, packed + panel * panel_bytes, n, k, panel, codes, scales);
}

const kt_packing *kt_packing_of(const char *family) {
    static const kt_packing *const all[] = {&kt_pack_q4, &kt_pack_b16};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!strcmp(all[i]->family, family)) return all[i];
    return NULL;
}
