/* How kernels on vectors see scales and zero points: the header of a group, which pack/groups.h has the picture of.
 *
 * A way is a constant at every call: a scale kind and flags. A kind is a row here: its name, its bytes, its load.
 */
#ifndef KT_SCALES_H
#define KT_SCALES_H

#include "kernels/common/vector.h"

enum {
    NONE,
    UE8M0,
    E4M3,
    BF16,
    FP16,
    PANEL,       /* one fp32 for all columns of a panel, a line of copies */
    KINDS = 7,   /* the bits of a kind */
    FOLDED = 8,  /* scales are in the weights: one chain over all k */
    HALVES = 16, /* a scale of 16 k: two in a block */
    ZERO_POINTS = 32,
};
typedef int scaling;

INLINE int kind_of(const scaling how) { return how & KINDS; }
/* Whether a scale multiplies its group's sum. */
INLINE int in_groups(const scaling how) { return kind_of(how) != NONE && !(how & FOLDED); }
/* Whether decode() needs something of each group. */
INLINE int folds(const scaling how) { return how & (FOLDED | ZERO_POINTS); }
INLINE int halves(const scaling how) { return how & HALVES ? 2 : 1; }

/* Of a header's row of scales, and of all of it. */
INLINE size_t scales_bytes(const scaling how) {
    const int kind = kind_of(how);
    return kind == NONE ? 0 : kind == PANEL ? LINE : kind == BF16 || kind == FP16 ? KT_PANEL * 2 : KT_PANEL;
}
INLINE size_t header_bytes(const scaling how) { return halves(how) * scales_bytes(how) + (how & ZERO_POINTS ? KT_PANEL : 0); }

/* Floats of fewer bits, from the top of a dword on: moved to where fp32 has its exponent and mantissa, they are the number times a
 * small power of two, denormals included, which one exact multiplication undoes. */
INLINE f32v raise(const u32v top, const int down, const uint32_t keep, const float factor) {
    return (f32v)((u32v)((i32v)top >> down) & keep) * splat(factor);
}
INLINE f32v e4m3_at_top(const u32v top) { return raise(top, 4, 0x87F00000, 0x1p120f); }
INLINE f32v fp16_at_top(const u32v top) { return raise(top, 3, 0x8FFFE000, 0x1p112f); }

/* UE8M0's byte 0 is 2^-127, a denormal, where the shift alone would give 0. */
INLINE f32v load_ue8m0(const uint8_t *p) {
    const u32v bits = widen_u8(p) << 23;
#if VECTOR_BYTES == 64
    return (f32v)_mm512_max_epu32((__m512i)bits, _mm512_set1_epi32(0x00400000));
#elif VECTOR_BYTES == 32
    return (f32v)_mm256_max_epu32((__m256i)bits, _mm256_set1_epi32(0x00400000));
#else
    return (f32v)(bits | ((u32v)(bits == 0) & 0x00400000));
#endif
}

/* Scales of the columns of vector v, as fp32; half: of which 16 k, if there are two. */
INLINE f32v load_scales(const uint8_t *header, const int v, const int half, const scaling how) {
    const uint8_t *row = header + half * scales_bytes(how);
    switch (kind_of(how)) {
        case NONE: return splat(1); /* where sums are finished apart, since x has scales */
        case UE8M0: return load_ue8m0(row + v * LANES);
        case E4M3: return e4m3_at_top(widen_u8(row + v * LANES) << 24);
        case BF16: return (f32v)(widen_u16(row + v * LANES * 2) << 16);
        case FP16: return fp16_at_top(widen_u16(row + v * LANES * 2) << 16);
        default: return load_f32(row);
    }
}

/* Zero points of the columns of vector v, as integers. */
INLINE u32v load_zero_points(const uint8_t *header, const int v, const scaling how) {
    return widen_u8(header + halves(how) * scales_bytes(how) + v * LANES);
}

#endif
