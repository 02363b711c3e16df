/* What packings share: rows of dwords become columns. */
#ifndef KT_TRANSPOSE_H
#define KT_TRANSPOSE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))

typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef uint32_t u32x4 __attribute__((vector_size(16)));

/* GCC before 12 has no __builtin_shufflevector, clang no __builtin_shuffle; without either, GCC shuffles through memory, at 0.6 times
 * the speed. */
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLE(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(type, a, b, ...) __builtin_shuffle(a, b, (type){__VA_ARGS__})
#endif

/* a0 b0 a1 b1 and so on, of the first halves of a and b, or of the second. */
#define FIRST_WORDS(a, b) SHUFFLE(u16x8, a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define SECOND_WORDS(a, b) SHUFFLE(u16x8, a, b, 4, 12, 5, 13, 6, 14, 7, 15)

/* Exchanges, in each of four dwords, the bits of `mask` with those `shift` above them. */
static inline u32x4 swap_bits(u32x4 v, uint32_t mask, int shift) {
    const u32x4 changed = (v ^ v >> shift) & mask;
    return v ^ changed ^ changed << shift;
}

/* Bytes 0 1 2 3 <-> 0 2 1 3. */
static inline u32x4 swap_middle(u32x4 v) { return swap_bits(v, 0x0000FF00, 8); }

/* a[i] b[i] a[i+1] b[i+1]. */
#define INTERLEAVE(a, b, i) SHUFFLE(u32x4, a, b, i, (i) + 4, (i) + 1, (i) + 5)

/* Four rows of four dwords become columns. */
static inline void transpose_four(u32x4 v[4]) {
    const u32x4 low02 = INTERLEAVE(v[0], v[2], 0), low13 = INTERLEAVE(v[1], v[3], 0);
    const u32x4 high02 = INTERLEAVE(v[0], v[2], 2), high13 = INTERLEAVE(v[1], v[3], 2);
    v[0] = INTERLEAVE(low02, low13, 0), v[1] = INTERLEAVE(low02, low13, 2);
    v[2] = INTERLEAVE(high02, high13, 0), v[3] = INTERLEAVE(high02, high13, 2);
}

/* v[i][j] to dword i at to + j * stride: four rows of four dwords to four cache lines. */
static inline void store_transposed(const u32x4 v[4], uint8_t *to, size_t stride) {
    u32x4 columns[4] = {v[0], v[1], v[2], v[3]};
    transpose_four(columns);
    for (int j = 0; j < 4; j++) memcpy(to + j * stride, &columns[j], sizeof columns[j]);
}

#endif
