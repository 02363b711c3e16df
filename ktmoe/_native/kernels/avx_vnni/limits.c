/* The machine's limits by avx_vnni: reading as in limits.h, multiplying with VPDPBUSD. */
#include "kernels/avx_vnni/kernels.h"

#define READ kt_read_avx_vnni

#include "kernels/limits.h"

/* 12 chains: enough for a latency of 6 at two a cycle. 64 FLOPs an instruction. */
double kt_peak_avx_vnni(size_t iterations) {
    enum { CHAINS = 12 };
    __m256i acc[CHAINS], a = _mm256_set1_epi8(1), b = a;
    for (int c = 0; c < CHAINS; c++) acc[c] = _mm256_setzero_si256();
    for (size_t i = 0; i < iterations; i++) {
        __asm__ volatile("" : "+x"(a), "+x"(b));
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) acc[c] = _mm256_dpbusd_avx_epi32(acc[c], a, b);
    }
    for (int c = 0; c < CHAINS; c++) __asm__ volatile("" : : "x"(acc[c]));
    return (double)iterations * CHAINS * 64;
}
