/* CPU detection and floating-point state: compiled for the baseline, and besides kernels/ the only file that needs x86. */
#include <cpuid.h>
#include <emmintrin.h>
#include <stdint.h>

#include "base/cpu.h"

enum { XCR0_AVX = 0x6, XCR0_AVX512 = 0xe6, XCR0_AMX = 0x60000 };

static uint64_t enabled_state(bool osxsave) {
    if (!osxsave) return 0;
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

/* Sources: Intel SDM volume 2, CPUID leaves 1, 7.0 and 7.1; volume 1, 14.3 and 15.2 for the XCR0 checks. */
const kt_cpu_feature *kt_cpu_features(size_t *count) {
    static kt_cpu_feature features[16];
    uint32_t leaf1[4] = {0}, leaf7[4] = {0}, leaf71[4] = {0};
    __get_cpuid(1, &leaf1[0], &leaf1[1], &leaf1[2], &leaf1[3]);
    __get_cpuid_count(7, 0, &leaf7[0], &leaf7[1], &leaf7[2], &leaf7[3]);
    if (leaf7[0] >= 1) __get_cpuid_count(7, 1, &leaf71[0], &leaf71[1], &leaf71[2], &leaf71[3]);

    const uint64_t state = enabled_state(leaf1[2] >> 27 & 1);
    const bool avx = (state & XCR0_AVX) == XCR0_AVX, avx512 = (state & XCR0_AVX512) == XCR0_AVX512;
    const bool amx = (state & XCR0_AMX) == XCR0_AMX;
    const kt_cpu_feature found[] = {
        {"avx2", avx && (leaf7[1] >> 5 & 1)},
        {"fma", avx && (leaf1[2] >> 12 & 1)},
        {"avx512f", avx512 && (leaf7[1] >> 16 & 1)},
        {"avx512bw", avx512 && (leaf7[1] >> 30 & 1)},
        {"avx512vl", avx512 && (leaf7[1] >> 31 & 1)},
        {"avx512_bf16", avx512 && (leaf71[0] >> 5 & 1)},
        {"avx512vbmi", avx512 && (leaf7[2] >> 1 & 1)},
        {"amx_tile", amx && (leaf7[3] >> 24 & 1)},
        {"amx_bf16", amx && (leaf7[3] >> 22 & 1)},
        {"avx512_vnni", avx512 && (leaf7[2] >> 11 & 1)},
        {"gfni", leaf7[2] >> 8 & 1}, /* there are CPUs with GFNI and without AVX: it has forms on SSE's registers */
        {"avx_vnni", avx && (leaf71[0] >> 4 & 1)},
        {"avx512_fp16", avx512 && (leaf7[3] >> 23 & 1)},
    };
    _Static_assert(sizeof found <= sizeof features, "each has a place");
    *count = sizeof found / sizeof found[0];
    for (size_t i = 0; i < *count; i++) features[i] = found[i]; /* same bytes every time: a race is harmless */
    return features;
}

void kt_cpu_relax(void) { _mm_pause(); }

unsigned kt_fp_enter(void) {
    const unsigned state = _mm_getcsr();
    _mm_setcsr(0x1F80);
    return state;
}

void kt_fp_leave(unsigned state) { _mm_setcsr(state); }
