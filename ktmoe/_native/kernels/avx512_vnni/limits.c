/* The machine's limits by avx512_vnni: reading as in limits.h, multiplying with VPDPBUSD. */
#include "kernels/avx512_vnni/kernels.h"

#define READ kt_read_avx512_vnni

#include "kernels/limits.h"

/* 12 chains: enough for a latency of 6 at two a cycle. 128 FLOPs an instruction. */
double kt_peak_avx512_vnni(size_t iterations) {
    enum { CHAINS = 12 };
    __m512i acc[CHAINS], a = _mm512_set1_epi8(1), b = a;
    for (int c = 0; c < CHAINS; c++) acc[c] = _mm512_setzero_si512();
    for (size_t i = 0; i < iterations; i++) {
        __asm__ volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) acc[c] = _mm512_dpbusd_epi32(acc[c], a, b);
    }
    for (int c = 0; c < CHAINS; c++) __asm__ volatile("" : : "v"(acc[c]));
    return (double)iterations * CHAINS * 128;
}
