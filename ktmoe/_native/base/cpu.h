/* What this CPU and its operating system support, stores past its caches, and a thread's floating-point state. */
#ifndef KT_CPU_H
#define KT_CPU_H

#include <stdbool.h>
#include <stddef.h>

typedef struct kt_cpu_feature {
    const char *name; /* as /proc/cpuinfo spells it */
    bool present;
} kt_cpu_feature;
const kt_cpu_feature *kt_cpu_features(size_t *count);

void kt_cpu_relax(void); /* a spin loop's pause */

/* Whole lines of 64 bytes to memory past the caches, `step` bytes from one to the next: a line that is not going to be read soon
 * need not be read before it is written. Both sides are aligned to 16. Others see them after the writer's kt_cpu_streamed(). */
void kt_cpu_stream(void *to, size_t step, const void *from, size_t lines);
void kt_cpu_streamed(void);

unsigned kt_fp_enter(void);       /* IEEE defaults: round to nearest, denormals kept, no traps; returns the old state */
void kt_fp_leave(unsigned state); /* puts it back */

#endif
