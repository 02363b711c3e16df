/* Spinning and sleeping. No wake-up is lost: one side changes the value and then looks for sleepers, the other one counts itself
 * a sleeper and then looks at the value. */
#include "base/event.h"
#include "base/cpu.h"

static _Atomic uint64_t spin_ns;

void kt_event_spin(uint64_t nanoseconds) { /* a store would take the line from all waiters */
    if (atomic_load_explicit(&spin_ns, memory_order_relaxed) != nanoseconds)
        atomic_store_explicit(&spin_ns, nanoseconds, memory_order_relaxed);
}

void kt_event_wait(kt_event *e, uint32_t old, kt_patience patience) {
    enum { POLL = 64 }; /* polls between looks at the clock, the first of which comes after some */
    const uint64_t longest = atomic_load_explicit(&spin_ns, memory_order_relaxed) * patience;
    for (uint64_t now = 0, end = UINT64_MAX; longest && now < end;) {
        for (int i = 0; i < POLL; i++) {
            if (atomic_load_explicit(&e->value, memory_order_acquire) != old) return;
            kt_cpu_relax();
        }
        now = kt_os_nanoseconds();
        if (end == UINT64_MAX) end = now + longest;
    }
    atomic_fetch_add(&e->sleepers, 1);
    while (atomic_load(&e->value) == old) kt_os_wait(&e->value, old);
    atomic_fetch_sub(&e->sleepers, 1);
}

void kt_event_wake(kt_event *e) {
    if (atomic_load(&e->sleepers)) kt_os_wake(&e->value);
}
