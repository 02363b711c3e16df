/* What the machine can do at most with these instructions: the figures that benchmarks divide by. */
#include <immintrin.h>

#include "kernels/avx512_bf16/kernels.h"

void kt_read_avx512_bf16(const void *p, size_t bytes) {
    const uint8_t *from = p;
    __m512i sum[4] = {0};
    size_t i = 0;
    for (; i + 256 <= bytes; i += 256)
        for (int j = 0; j < 4; j++) sum[j] = _mm512_xor_si512(sum[j], _mm512_loadu_si512(from + i + 64 * j));
    for (int j = 0; j < 4; j++) __asm__ volatile("" : : "v"(sum[j]));
}

/* 12 chains: enough for a latency of 6 at two a cycle. 64 FLOPs an instruction. */
double kt_peak_avx512_bf16(size_t iterations) {
    enum { CHAINS = 12 };
    __m512 acc[CHAINS];
    __m512i a = _mm512_set1_epi32(0x3F803F80), b = a;
    for (int c = 0; c < CHAINS; c++) acc[c] = _mm512_setzero_ps();
    for (size_t i = 0; i < iterations; i++) {
        __asm__ volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) acc[c] = _mm512_dpbf16_ps(acc[c], (__m512bh)a, (__m512bh)b);
    }
    for (int c = 0; c < CHAINS; c++) __asm__ volatile("" : : "v"(acc[c]));
    return (double)iterations * CHAINS * 64;
}
