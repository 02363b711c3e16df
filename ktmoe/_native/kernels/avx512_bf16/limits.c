/* The machine's limits by avx512_bf16: reading as in limits.h, multiplying with VDPBF16PS. */
#include "kernels/avx512_bf16/kernels.h"

#define READ kt_read_avx512_bf16

#include "kernels/limits.h"

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
