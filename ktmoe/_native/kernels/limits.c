/* The machine's limits by this instruction set, which benchmarks divide by: what can be read at most, and what the multiplies of
 * its kernels do from registers.
 */
#include "kernels/common/isa.h"
#include "kernels/common/vector.h"

/* A line at a time in 16-byte loads, the same for all instruction sets, so that percentages of it compare. One stream is prefetched as
 * kernels do it, the fastest of those tried. Of several, each is as far from the others as pages are: the hardware fetches ahead
 * in each by itself. */
enum { AHEAD_BYTES = 3072, STREAM_UNIT = 4096 };
typedef uint32_t u32x4 __attribute__((vector_size(16)));

INLINE void read_line(const uint8_t *from, u32x4 sum[4]) {
    for (int j = 0; j < 4; j++) {
        u32x4 v;
        memcpy(&v, from + 16 * j, sizeof v);
        sum[j] ^= v;
    }
}

INLINE void read_streams(const uint8_t *from, const size_t bytes, const size_t streams, u32x4 sum[4]) {
    const size_t each = bytes / streams / STREAM_UNIT * STREAM_UNIT;
    for (size_t i = 0; i < each; i += LINE)
#pragma GCC unroll 8
        for (size_t s = 0; s < streams; s++) read_line(from + s * each + i, sum);
    for (size_t i = streams * each; i + LINE <= bytes; i += LINE) read_line(from + i, sum);
}

void KT_NAME(read)(const void *p, size_t bytes, size_t streams) {
    const uint8_t *from = p;
    u32x4 sum[4] = {0};
    switch (streams) {
        case 8: read_streams(from, bytes, 8, sum); break;
        case 4: read_streams(from, bytes, 4, sum); break;
        case 2: read_streams(from, bytes, 2, sum); break;
        default:
            for (size_t i = 0; i + LINE <= bytes; i += LINE) {
                prefetch_l1(from + i + AHEAD_BYTES);
                read_line(from + i, sum);
            }
    }
    const u32x4 all = sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
    volatile uint32_t sink = all[0] ^ all[1] ^ all[2] ^ all[3];
    (void)sink;
}

/* 12 chains are enough for a latency of 6 at two a cycle. */
enum { CHAINS = VECTOR_BYTES == 16 ? 10 : 12 };

#if defined __AMX_BF16__
#include "kernels/common/tile.h"

/* Four chains, as kernels have them: enough, since a TDPBF16PS takes 16 cycles and its result 52. */
double KT_NAME(peak)(size_t iterations) {
    enum { FLOPS = 2 * 16 * 16 * KT_BLOCK };
    static const uint32_t ones[] = {0x3F803F80, 0x3F803F80, 0x3F803F80, 0x3F803F80, 0x3F803F80, 0x3F803F80,
                                    0x3F803F80, 0x3F803F80, 0x3F803F80, 0x3F803F80, 0x3F803F80, 0x3F803F80,
                                    0x3F803F80, 0x3F803F80, 0x3F803F80, 0x3F803F80};
    tiles_configure();
    TILE_LOAD(4, ones, 0); /* not zeros, which might cost less power */
    TILE_LOAD(5, ones, 0);
    TILE_LOAD(6, ones, 0);
    TILE_LOAD(7, ones, 0);
    for (size_t i = 0; i < iterations; i++) {
        TILE_DOT(0, 4, 6);
        TILE_DOT(1, 4, 7);
        TILE_DOT(2, 5, 6);
        TILE_DOT(3, 5, 7);
    }
    tiles_release();
    return (double)iterations * 4 * FLOPS;
}

#elif defined __AVX512BF16__ || defined __AVX512VNNI__ || defined __AVXVNNI__
#if defined __AVX512BF16__ /* VDPBF16PS */
enum { PRODUCTS = 2 };
#define ONES 0x3F803F80
#define MULTIPLY(sum, a, b) (i32v) _mm512_dpbf16_ps((__m512)(sum), (__m512bh)(a), (__m512bh)(b))
#else /* VPDPBUSD */
enum { PRODUCTS = 4 };
#define ONES 0x01010101
#if VECTOR_BYTES == 64
#define MULTIPLY(sum, a, b) (i32v) _mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(a), (__m512i)(b))
#else
#define MULTIPLY(sum, a, b) (i32v) _mm256_dpbusd_avx_epi32((__m256i)(sum), (__m256i)(a), (__m256i)(b))
#endif
#endif

double KT_NAME(peak)(size_t iterations) {
    i32v acc[CHAINS] = {0}, a = (i32v){0} + ONES, b = a;
    for (int c = 0; c < CHAINS; c++) __asm__ volatile("" : "+v"(acc[c])); /* equal chains would be one to the compiler */
    for (size_t i = 0; i < iterations; i++) {
        __asm__ volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) acc[c] = MULTIPLY(acc[c], a, b);
    }
    for (int c = 0; c < CHAINS; c++) __asm__ volatile("" : : "v"(acc[c]));
    return (double)iterations * CHAINS * LANES * PRODUCTS * 2;
}

#else
/* Multiply and add: without FMA an instruction each, so that 10 chains fill 16 registers. The factor keeps the sums bounded. */
double KT_NAME(peak)(size_t iterations) {
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
