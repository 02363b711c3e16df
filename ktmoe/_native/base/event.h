/* A counter that threads wait on: they spin for a while, then sleep. */
#ifndef KT_EVENT_H
#define KT_EVENT_H

#include <stdatomic.h>

#include "base/os.h"

/* Whoever has one gives it a cache line. sleepers tells the other side whether a system call is needed to wake them. */
typedef struct kt_event {
    _Atomic uint32_t value, sleepers;
} kt_event;

/* How many times the time that is set a waiter spins. What is computed now ends soon: to sleep meanwhile costs more, up to a
 * millisecond on some virtual machines. */
typedef enum kt_patience { KT_NEVER = 0, KT_IDLE = 1, KT_IN_TASK = 20 } kt_patience;

void kt_event_spin(uint64_t nanoseconds); /* that a waiter spins before it sleeps, from its next wait on */
void kt_event_wait(kt_event *e, uint32_t old, kt_patience patience); /* while the value is that one */
void kt_event_wake(kt_event *e); /* after a change, in memory order seq_cst, that somebody may wait for */
static inline void kt_event_bump(kt_event *e) {
    atomic_fetch_add(&e->value, 1);
    kt_event_wake(e);
}

#endif
