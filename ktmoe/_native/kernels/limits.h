/* What the machine can read at most, and multiply with the vectors of the instruction set that includes this: the figures that
 * benchmarks divide by. The includer defines READ and, unless its multiplies are others, PEAK, the names of what this defines.
 */
#include "kernels/vector.h"

/* A line at a time in 16-byte loads, prefetched as kernels do it: the fastest of those tried, and the same for all instruction
 * sets, so that their shares of it compare. */
void READ(const void *p, size_t bytes) {
    enum { LINE_BYTES = 64, AHEAD_BYTES = 3072 };
    typedef uint32_t u32x4 __attribute__((vector_size(16)));
    const uint8_t *from = p;
    u32x4 sum[4] = {0};
    for (size_t i = 0; i + LINE_BYTES <= bytes; i += LINE_BYTES) {
        prefetch_l1(from + i + AHEAD_BYTES);
        for (int j = 0; j < 4; j++) {
            u32x4 v;
            memcpy(&v, from + i + 16 * j, sizeof v);
            sum[j] ^= v;
        }
    }
    const u32x4 all = sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
    volatile uint32_t sink = all[0] ^ all[1] ^ all[2] ^ all[3];
    (void)sink;
}

#ifdef PEAK
/* Multiply and add in 12 chains, enough for a latency of 6 at two a cycle; 10 of 16 registers where both are an instruction.
 * The factor keeps the sums bounded. */
double PEAK(size_t iterations) {
    enum { CHAINS = VECTOR_BYTES == 16 ? 10 : 12 };
    f32v acc[CHAINS];
    volatile float start = 0.5f;
    const f32v a = splat(start);
    for (int c = 0; c < CHAINS; c++) acc[c] = a;
    for (size_t i = 0; i < iterations; i++)
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) acc[c] = multiply_add(acc[c], a, a);
    f32v all = acc[0];
    for (int c = 1; c < CHAINS; c++) all += acc[c];
    volatile float sink = 0;
    for (int l = 0; l < LANES; l++) sink += all[l];
    return (double)iterations * CHAINS * LANES * 2;
}
#endif
