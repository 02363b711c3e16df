/* q4 with 8-bit x: codes stand for small integers; see int8_rows.h and panel.h.
 *
 * DEFINITION  for each 32 k: sum of whole[code] * q, exact: of (whole[code] + 16) * q, bytes that are not negative, begun at
 *             -16 * sum of q;
 *             out = fma(sum * (scale of x * unit), scale, out): sum has 16 bits and the scale of x has 8, so that both products
 *             are exact but for fp32's range
 * LAYOUT      pack/q4.c. The low nibbles of a dword's bytes are k0 k4 k1 k5, the high ones k2 k6 k3 k7, and so are those of x.
 * REGULARITIES VPDPBUSD adds four products to a sum of 32 bits. VPMADDUBSW and VPADDW sum even and odd k in words of 16 k: of a
 *             sum begun at -16 * sum of q, what is added counts whole * q and what is not -16 * q, each at most 16 * 127, so
 *             that it is always within +-32512. Two products, at most 2 * 32 * 127, never saturate.
 */
#include "kernels/common/int8_rows.h"
#include "kernels/common/isa.h"
#include "kernels/common/q4_layout.h"

enum {
    STEP_K = 4,
    DECODE_K = 256, /* a strip is 16 KiB with AVX-512, 8 KiB without; 512 was slower */
    IN_PLACE = 0,
    BLOCK_SUMS = 1,
#if VECTOR_BYTES == 64
    BY_VECTOR = 0,
    HOLD_TOTALS = 1,
    HOLD_HALVES = 0,
    TILE_ROWS = 3, /* x 4 vectors = 12 sums and 12 totals of 32 registers; a broadcast of x serves a whole panel */
    TILE_VECTORS = 4,
    FEW_ROWS = 6,
    FEW_MAX = 12, /* in two passes; from there on, decoding once is faster */
#else
    BY_VECTOR = 1,
    HOLD_TOTALS = 0,
    HOLD_HALVES = 0,
    TILE_ROWS = 6, /* x 2 vectors = 12 sums of 16 registers */
    TILE_VECTORS = 2,
    FEW_ROWS = 2,
    FEW_MAX = 2,
#endif
};

#if VECTOR_BYTES == 64
#define PASSES(P) P(1, 4) P(2, 4) P(3, 4) P(4, 4) P(5, 4) P(6, 4)
#else
#define PASSES(P) P(1, 8) P(2, 4)
#endif

typedef uint8_t u8v __attribute__((vector_size(VECTOR_BYTES)));
typedef struct table {
    u32v whole;
    float unit;
} table;
typedef char fold;
typedef i32v sums;

INLINE u32v lookup(const u32v table, const u32v index) {
#if VECTOR_BYTES == 64
    return (u32v)_mm512_shuffle_epi8((__m512i)table, (__m512i)index);
#else
    return (u32v)_mm256_shuffle_epi8((__m256i)table, (__m256i)index);
#endif
}

INLINE table load_table(const kt_dot *a, const scaling how) {
    (void)how;
    u8v whole;
    for (int i = 0; i < VECTOR_BYTES; i++) whole[i] = (uint8_t)a->codebook->whole[i % 16];
    return (table){(u32v)(whole + 16), a->codebook->unit};
}

INLINE fold load_fold(const uint8_t *header, const int v, const scaling how) { return (void)header, (void)v, (void)how, 0; }

INLINE u32v decode(const place *p, const int v, const int step, const scaling how, const table *t, const fold *f) {
    (void)how, (void)f;
    const u32v codes = load_u32(codes_at(p, v));
    return lookup(t->whole, (step ? codes >> 4 : codes) & 0x0F0F0F0F);
}

INLINE const int8_block *tail(const void *x, const size_t k, const size_t block) {
    return (const int8_block *)((const int8_t *)x + k) + block;
}

INLINE sums start(const void *x, const size_t k, const size_t block) {
    float bits;
    memcpy(&bits, &tail(x, k, block)->start, sizeof bits);
    return (sums)splat(bits);
}

INLINE sums dot(const sums sum, const u32v w, const u32v x) {
#if defined __AVX512VNNI__
    return (sums)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined __AVXVNNI__
    return (sums)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#else
    return (sums)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)w, (__m256i)x));
#endif
}

#if VECTOR_BYTES == 64
INLINE i32v whole_sum(const sums sum) { return sum; }
#else
INLINE i32v whole_sum(const sums sum) {
    return SUMS_OF_WORDS ? (i32v)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)) : sum;
}
#endif

INLINE f32v factor(const void *x, const size_t k, const size_t block, const table *t) {
    return splat(tail(x, k, block)->scale) * t->unit;
}

INLINE f32v finish(const sums sum, const f32v scale, const f32v of_x, const f32v out) {
    return multiply_add(__builtin_convertvector(whole_sum(sum), f32v) * of_x, scale, out);
}

#include "kernels/loops/panel.h"

FUNCTIONS(ue8m0, UE8M0)
FUNCTIONS(bf16, BF16)
FUNCTIONS(fp16, FP16)

#define Q4 .family = "q4", .rows = &KT_NAME(rows_int8), .whole = 1
const kt_kernel KT_NAME(q4_int8)[] = {
    {Q4, .scale = "ue8m0", PER_BLOCK, SERVED_BY(ue8m0)},
    {Q4, .scale = "bf16", PER_BLOCKS, SERVED_BY(bf16)},
    {Q4, .scale = "fp16", PER_BLOCKS, SERVED_BY(fp16)},
    {0},
};
