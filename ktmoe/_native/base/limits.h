/* The machine's limits and the pool's latencies, measured with its threads: seconds, or a negative errno. */
#ifndef KT_LIMITS_H
#define KT_LIMITS_H

#include "base/placement.h"

/* The time in which each shard's threads read that shard's bytes, each in so many streams. The caller holds the pool's lock,
 * since somebody may want to free the bytes. */
double kt_limit_read(void (*read)(const void *, size_t, size_t), size_t streams, const kt_placement *placement,
                     const uint8_t *const *p, const size_t *bytes);
double kt_limit_peak(double (*peak)(size_t), size_t iterations, double *flops);
/* The time until a run's last worker begins, after all workers were idle for so long. */
double kt_latency_wake(uint64_t idle_ns);
/* The mean times over count > 0: of a gate that all workers pass and wait at; and of handing one cache line from a worker to
 * another, which no wake-up and no gate can beat: -EINVAL with fewer than two workers. */
double kt_latency_gate(size_t count);
double kt_latency_handoff(size_t count);

#endif
