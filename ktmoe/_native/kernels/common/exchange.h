/* Bits of a code's place in vectors that change places with one another, for the transposition of codes: without a table, so that any
 * instruction set does it.
 */
#ifndef KT_EXCHANGE_H
#define KT_EXCHANGE_H

#include "kernels/common/vector.h"

typedef uint64_t u64v __attribute__((vector_size(VECTOR_BYTES)));

INLINE u64v each_qword(const uint64_t bits) { return (u64v){0} + bits; }

#if VECTOR_BYTES == 64
/* Where lanes of a and b, side by side, come from when this bit of their numbers changes places with the one that tells a from b. */
INLINE u32v lanes_exchanged(const u32v lanes, const int bit) {
    const u32v differ = ((lanes >> bit) ^ (lanes >> 4)) & 1;
    return lanes ^ differ << bit ^ differ << 4;
}
#endif

/* Lanes of a whose number has this bit change places with those of b whose number lacks it. */
INLINE void exchange_lanes(u32v *a, u32v *b, const int bit) {
    const u32v x = *a, y = *b;
#if VECTOR_BYTES == 64
    const u32v lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    *a = (u32v)_mm512_permutex2var_epi32((__m512i)x, (__m512i)lanes_exchanged(lanes, bit), (__m512i)y);
    *b = (u32v)_mm512_permutex2var_epi32((__m512i)x, (__m512i)lanes_exchanged(lanes + LANES, bit), (__m512i)y);
#else
    if (bit == 0) {
        *a = (x & (u32v)each_qword(0x00000000FFFFFFFF)) | (u32v)((u64v)y << 32);
        *b = (y & (u32v)each_qword(0xFFFFFFFF00000000)) | (u32v)((u64v)x >> 32);
    }
#if VECTOR_BYTES == 32
    if (bit == 1) {
        *a = (u32v)_mm256_unpacklo_epi64((__m256i)x, (__m256i)y);
        *b = (u32v)_mm256_unpackhi_epi64((__m256i)x, (__m256i)y);
    }
    if (bit == 2) {
        *a = (u32v)_mm256_permute2x128_si256((__m256i)x, (__m256i)y, 0x20);
        *b = (u32v)_mm256_permute2x128_si256((__m256i)x, (__m256i)y, 0x31);
    }
#else
    if (bit == 1) {
        *a = (u32v)(u64v){((u64v)x)[0], ((u64v)y)[0]};
        *b = (u32v)(u64v){((u64v)x)[1], ((u64v)y)[1]};
    }
#endif
#endif
}

/* Exchanges lanes by one bit, then by another. */
INLINE void exchange_lanes_twice(u32v *a, u32v *b, const int first, const int second) {
#if VECTOR_BYTES == 64
    const u32v x = *a, y = *b, lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const u32v of_a = lanes_exchanged(lanes_exchanged(lanes, second), first);
    const u32v of_b = lanes_exchanged(lanes_exchanged(lanes + LANES, second), first);
    *a = (u32v)_mm512_permutex2var_epi32((__m512i)x, (__m512i)of_a, (__m512i)y);
    *b = (u32v)_mm512_permutex2var_epi32((__m512i)x, (__m512i)of_b, (__m512i)y);
#else
    exchange_lanes(a, b, first);
    exchange_lanes(a, b, second);
#endif
}

/* The two words in the middle of each qword. */
INLINE u32v exchange_middle(const u32v x) {
#if defined(__AVX512BW__)
    return (u32v)_mm512_shuffle_epi8((__m512i)x, _mm512_set4_epi32(0x0F0E0B0A, 0x0D0C0908, 0x07060302, 0x05040100));
#elif VECTOR_BYTES == 32
    const __m128i order = _mm_set_epi32(0x0F0E0B0A, 0x0D0C0908, 0x07060302, 0x05040100);
    return (u32v)_mm256_shuffle_epi8((__m256i)x, _mm256_broadcastsi128_si256(order));
#else
    const u64v bits = (u64v)x, changed = (bits ^ bits >> 16) & each_qword(0xFFFF0000);
    return (u32v)(bits ^ changed ^ changed << 16);
#endif
}

/* Exchanges, in each dword, the upper ones of two neighbouring pieces of `bits` bits of a with the lower ones of b. */
INLINE void exchange_pieces(u32v *a, u32v *b, const int bits) {
    const uint32_t lower = bits == 4 ? 0x0F0F0F0F : 0x00FF00FF;
    const u32v x = *a, y = *b;
    *a = select_bits(lower, x, y << bits);
    *b = select_bits(lower, x >> bits, y);
}

#endif
