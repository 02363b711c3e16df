/* Carves 64-byte aligned arrays from a block of memory; with base NULL it only adds up. */
#ifndef KT_CARVE_H
#define KT_CARVE_H

#include "base/numbers.h"
#include "sanitizer.h"

typedef struct kt_carver {
    uint8_t *base;
    size_t used;
} kt_carver;

/* beyond: so many bytes more may be read behind the array. */
static inline void *kt_carve_beyond(kt_carver *c, size_t count, size_t size, size_t beyond) {
    uint8_t *p = c->base ? c->base + c->used : NULL;
    const size_t bytes = count * size + beyond, place = kt_round_up(bytes, 64) + KT_GAP_BYTES;
    c->used += place;
    if (p) {
        kt_permit(p, bytes);
        kt_spoil(p, bytes);
        kt_forbid(p + bytes, place - bytes);
    }
    return p;
}

static inline void *kt_carve(kt_carver *c, size_t count, size_t size) { return kt_carve_beyond(c, count, size, 0); }

#endif
