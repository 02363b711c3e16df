/* Carves 64-byte aligned arrays from a block of memory; with base NULL it only adds up. */
#ifndef KT_CARVE_H
#define KT_CARVE_H

#include "base/numbers.h"

typedef struct kt_carver {
    uint8_t *base;
    size_t used;
} kt_carver;

static inline void *kt_carve(kt_carver *c, size_t count, size_t size) {
    void *p = c->base ? c->base + c->used : NULL;
    c->used += kt_round_up(count * size, 64);
    return p;
}

#endif
