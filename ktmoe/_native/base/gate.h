/* A count that goes down to 0, where threads wait for it. Within one task: its memory must outlast whoever passes last. */
#ifndef KT_GATE_H
#define KT_GATE_H

#include "base/event.h"

/* A count on a cache line of its own. */
typedef struct kt_count {
    _Alignas(64) _Atomic uint32_t value;
} kt_count;

typedef struct kt_gate {
    _Alignas(64) kt_event left;
} kt_gate;

/* Closes a gate before any thread passes it or waits for it. No other initialisation is needed; a count of 0 leaves it open. */
static inline void kt_gate_close(kt_gate *g, uint32_t count) {
    atomic_store_explicit(&g->left.value, count, memory_order_relaxed);
    atomic_store_explicit(&g->left.sleepers, 0, memory_order_relaxed);
}

/* Counts down. What the caller has written until now is seen by whoever waited. */
static inline void kt_gate_pass(kt_gate *g, uint32_t count) {
    if (atomic_fetch_sub(&g->left.value, count) == count) kt_event_wake(&g->left);
}

static inline bool kt_gate_is_open(kt_gate *g) { return !atomic_load_explicit(&g->left.value, memory_order_acquire); }

static inline void kt_gate_wait(kt_gate *g) {
    for (uint32_t left; (left = atomic_load_explicit(&g->left.value, memory_order_acquire));)
        kt_event_wait(&g->left, left, KT_IN_TASK);
}

#endif
