/* The widest vectors of the instruction set that this is compiled for, by the compiler's vector extension. Only what the extension
 * cannot say is an intrinsic.
 */
#ifndef KT_VECTOR_H
#define KT_VECTOR_H

#include <string.h>

#include "ktmoe.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#define VECTOR_BYTES 64
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

#define INLINE static inline __attribute__((always_inline))
/* A function that is not compiled again for each of its callers. */
#if __has_attribute(noclone)
#define ONCE static __attribute__((noinline, noclone, unused))
#else
#define ONCE static __attribute__((noinline, unused))
#endif

enum {
    LANES = VECTOR_BYTES / 4,
    VECTORS = KT_PANEL / LANES, /* a panel's */
    LINE = 64,                  /* bytes of a cache line */
};

INLINE size_t least(size_t a, size_t b) { return a < b ? a : b; }

typedef float f32v __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t u32v __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t i32v __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t u16v __attribute__((vector_size(VECTOR_BYTES / 2)));

INLINE f32v load_f32(const void *p) {
    f32v v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE u32v load_u32(const void *p) {
    u32v v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store_f32(void *p, f32v v) { memcpy(p, &v, sizeof v); }

INLINE void prefetch_l1(const void *p) { __builtin_prefetch(p, 0, 3); }
INLINE void prefetch_l2(const void *p) { __builtin_prefetch(p, 0, 2); }

#if VECTOR_BYTES == 64
INLINE f32v splat(float x) { return (f32v)_mm512_set1_ps(x); }
/* a * b + c, rounded once; portably, rounded twice. */
INLINE f32v multiply_add(f32v a, f32v b, f32v c) { return (f32v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#elif VECTOR_BYTES == 32
INLINE f32v splat(float x) { return (f32v)_mm256_set1_ps(x); }
INLINE f32v multiply_add(f32v a, f32v b, f32v c) { return (f32v)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#else
INLINE f32v splat(float x) { return (f32v){x, x, x, x}; }
INLINE f32v multiply_add(f32v a, f32v b, f32v c) { return a * b + c; }
#endif

/* A dword, in all lanes. */
INLINE u32v broadcast(const void *x) {
    float bits;
    memcpy(&bits, x, sizeof bits);
    return (u32v)splat(bits);
}

/* sum * scale + total, rounded once. The portable way rounds to fp64 on its way. */
INLINE f32v scale_and_add(f32v sum, f32v scale, f32v total) {
#if VECTOR_BYTES > 16
    return multiply_add(sum, scale, total);
#else
    for (int l = 0; l < LANES; l++) total[l] = (float)(total[l] + (double)sum[l] * scale[l]);
    return total;
#endif
}

/* total - x * scale, rounded as scale_and_add() rounds. */
INLINE f32v scale_and_subtract(f32v x, f32v scale, f32v total) { return scale_and_add(x, -scale, total); }

INLINE f32v select_f32(i32v where, f32v a, f32v b) { return (f32v)((where & (i32v)a) | (~where & (i32v)b)); }

/* NaN in v passes, as comparisons with it are false. */
INLINE f32v at_most(f32v v, f32v limit) { return select_f32(v > limit, limit, v); }
INLINE f32v at_least(f32v v, f32v limit) { return select_f32(v < limit, limit, v); }

/* (v & mask) | bits. GCC 12 copies a constant for each VPTERNLOGD that it makes of that itself. */
INLINE u32v replace_bits(const u32v v, const uint32_t mask, const uint32_t bits) {
#if VECTOR_BYTES == 64
    return (u32v)_mm512_ternarylogic_epi32((__m512i)v, _mm512_set1_epi32((int)mask), _mm512_set1_epi32((int)bits), 0xEA);
#else
    return (v & mask) | bits;
#endif
}

/* GCC 12 makes two instructions of what is one. */
INLINE u32v select_bits(const uint32_t mask, const u32v where_set, const u32v elsewhere) {
#if VECTOR_BYTES == 64
    return (u32v)_mm512_ternarylogic_epi32(_mm512_set1_epi32((int)mask), (__m512i)where_set, (__m512i)elsewhere, 0xCA);
#else
    return (where_set & mask) | (elsewhere & ~mask);
#endif
}

/* Unsigned integers of a vector of columns as 32 bits. By __builtin_convertvector, GCC 12 does it one by one. */
INLINE u32v widen_u8(const uint8_t *p) {
#if VECTOR_BYTES == 64
    return (u32v)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif VECTOR_BYTES == 32
    return (u32v)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    return (u32v){p[0], p[1], p[2], p[3]};
#endif
}

/* Signed integers of a vector of columns as 32 bits. */
INLINE i32v widen_i8(const uint8_t *p) {
#if VECTOR_BYTES == 64
    return (i32v)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif VECTOR_BYTES == 32
    return (i32v)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    return (i32v){(int8_t)p[0], (int8_t)p[1], (int8_t)p[2], (int8_t)p[3]};
#endif
}

INLINE u32v widen_u16(const uint8_t *p) {
#if VECTOR_BYTES == 64
    return (u32v)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
#elif VECTOR_BYTES == 32
    return (u32v)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
#else
    uint16_t words[LANES];
    memcpy(words, p, sizeof words);
    return (u32v){words[0], words[1], words[2], words[3]};
#endif
}

#endif
