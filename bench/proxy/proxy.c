/* The proxy's kernel table. */
#include <immintrin.h>

#include "kernels/avx512_bf16/kernels.h"

/* The proxy's numbers are noise, a good part of it denormal, which would cost a microcode assist each that real activations
 * do not: flush them, from a worker's first activation to the end of its task, where the pool puts MXCSR back. */
static void activate(const kt_activate *a) {
    _mm_setcsr(_mm_getcsr() | 0x8040);
    kt_activate_avx512_bf16(a);
}

__attribute__((visibility("default"))) const kt_isa *kt_proxy(void) {
    static kt_isa proxy;
    proxy = kt_isa_avx512_bf16;
    proxy.name = "PROXY (VPDPWSSD in the place of VDPBF16PS)";
    proxy.activate = activate;
    return &proxy;
}
