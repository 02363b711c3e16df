/* What this CPU and its operating system support, and a thread's floating-point state. */
#ifndef KT_CPU_H
#define KT_CPU_H

#include <stdbool.h>
#include <stddef.h>

typedef struct kt_cpu_feature {
    const char *name; /* as /proc/cpuinfo spells it */
    bool present;
} kt_cpu_feature;
const kt_cpu_feature *kt_cpu_features(size_t *count);

void kt_cpu_relax(void);          /* a spin loop's pause */
unsigned kt_fp_enter(void);       /* IEEE defaults: round to nearest, denormals kept, no traps; returns the old state */
void kt_fp_leave(unsigned state); /* puts it back */

#endif
