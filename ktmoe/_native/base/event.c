/* Spinning and sleeping. No wake-up is lost: one side changes the value and then looks for sleepers, the other one counts itself
 * a sleeper and then looks at the value. */
#include "base/event.h"
#include "base/cpu.h"

static _Atomic uint64_t spin_ns;

void kt_event_spin(uint64_t nanoseconds) { atomic_store_explicit(&spin_ns, nanoseconds, memory_order_relaxed); }

void kt_event_wait(kt_event *e, uint32_t old, kt_patience patience) {
    enum { POLL = 64 }; /* polls between looks at the clock */
    const uint64_t longest = atomic_load_explicit(&spin_ns, memory_order_relaxed) * patience;
    if (longest) {
        const uint64_t start = kt_os_nanoseconds();
        do {
            for (int i = 0; i < POLL; i++) {
                if (atomic_load_explicit(&e->value, memory_order_acquire) != old) return;
                kt_cpu_relax();
            }
        } while (kt_os_nanoseconds() - start < longest);
    }
    atomic_fetch_add(&e->sleepers, 1);
    while (atomic_load(&e->value) == old) kt_os_wait(&e->value, old);
    atomic_fetch_sub(&e->sleepers, 1);
}

void kt_event_wake(kt_event *e) {
    if (atomic_load(&e->sleepers)) kt_os_wake(&e->value);
}
