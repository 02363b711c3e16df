/* The machine's limits by plain: the figures that measurements divide by. */
#include <string.h>

#include "kernels/plain/kernels.h"

/* One stream, whatever is asked for. */
void kt_read_plain(const void *p, size_t bytes, size_t streams) {
    (void)streams;
    uint64_t sum[8] = {0};
    for (size_t i = 0; i + sizeof sum <= bytes; i += sizeof sum) {
        uint64_t line[8];
        memcpy(line, (const uint8_t *)p + i, sizeof line);
        for (int j = 0; j < 8; j++) sum[j] ^= line[j];
    }
    volatile uint64_t sink = 0;
    for (int j = 0; j < 8; j++) sink ^= sum[j];
}

/* A multiply and an add in each of 40 chains: 10 vectors of 4. The factor keeps the sums bounded. */
double kt_peak_plain(size_t iterations) {
    enum { CHAINS = 40 };
    volatile float start = 0.5f;
    const float factor = start;
    float acc[CHAINS];
    for (int c = 0; c < CHAINS; c++) acc[c] = factor;
    for (size_t i = 0; i < iterations; i++)
        for (int c = 0; c < CHAINS; c++) acc[c] = acc[c] * factor + factor;
    volatile float sink = 0;
    for (int c = 0; c < CHAINS; c++) sink += acc[c];
    return (double)iterations * CHAINS * 2;
}
