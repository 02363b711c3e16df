/* The machine's limits and the pool's latencies, measured with its threads: seconds, or a negative errno. */
#ifndef KT_LIMITS_H
#define KT_LIMITS_H

#include "base/placement.h"

/* Each shard's threads read so many bytes of its own, each in so many streams; with the lock held, since somebody may want to free
 * them. */
double kt_limit_read(void (*read)(const void *, size_t, size_t), size_t streams, const kt_placement *placement,
                     const uint8_t *const *p, const size_t *bytes);
double kt_limit_peak(double (*peak)(size_t), size_t iterations, double *flops);
/* Until a run's last worker begins, all having been idle for so long. */
double kt_latency_wake(uint64_t idle_ns);
/* Means over count > 0: of a gate that all workers pass and wait at; and of handing one cache line from a worker to another, which no
 * wake-up and no gate can beat: -EINVAL with fewer than two workers. */
double kt_latency_gate(size_t count);
double kt_latency_handoff(size_t count);

#endif
