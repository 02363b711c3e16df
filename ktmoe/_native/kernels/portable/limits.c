/* What the machine can do at most with baseline instructions: the figures that benchmarks divide by. */
#include <string.h>

#include "kernels/portable/kernels.h"

typedef float f32x4 __attribute__((vector_size(16)));
typedef uint32_t u32x4 __attribute__((vector_size(16)));

void kt_read_portable(const void *p, size_t bytes) {
    const uint8_t *from = p;
    u32x4 sum[4] = {0};
    for (size_t i = 0; i + 64 <= bytes; i += 64)
        for (int j = 0; j < 4; j++) {
            u32x4 v;
            memcpy(&v, from + i + 16 * j, sizeof v);
            sum[j] ^= v;
        }
    u32x4 all = sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
    volatile uint32_t sink = all[0] ^ all[1] ^ all[2] ^ all[3];
    (void)sink;
}

/* 10 chains of multiply, then add, in 4 lanes: 8 FLOPs a step and chain. The factor keeps the sums bounded. */
double kt_peak_portable(size_t iterations) {
    enum { CHAINS = 10 };
    f32x4 acc[CHAINS];
    volatile float start = 0.5f;
    const f32x4 a = {start, start, start, start};
    for (int c = 0; c < CHAINS; c++) acc[c] = a;
    for (size_t i = 0; i < iterations; i++)
        for (int c = 0; c < CHAINS; c++) acc[c] = acc[c] * a + a;
    float sum = 0;
    for (int c = 0; c < CHAINS; c++) sum += acc[c][0] + acc[c][1] + acc[c][2] + acc[c][3];
    volatile float sink = sum;
    (void)sink;
    return (double)iterations * CHAINS * 8;
}
