/* How kernels on vectors see scales and offsets: the header of a group, which pack/layout.h has the picture of.
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
    INT8,        /* an integer, which a super-scale multiplies, exactly */
    KINDS = 7,   /* the bits of a kind */
    FOLDED = 8,  /* scales are in the weights: one chain over all k */
    HALVES = 16, /* a scale of 16 k: two in a block */
    ZERO_POINTS = 32,
    MINIMA = 64, /* which stand as the scales do */
    SUPER = 128, /* fp16 super-scales, of scales and of minima */
};
typedef int scaling;

INLINE int kind_of(const scaling how) { return how & KINDS; }
/* Whether a scale multiplies its group's sum. */
INLINE int in_groups(const scaling how) { return kind_of(how) != NONE && !(how & FOLDED); }
/* Whether decode() needs something of each group. */
INLINE int folds(const scaling how) { return how & (FOLDED | ZERO_POINTS); }
INLINE int halves(const scaling how) { return how & HALVES ? 2 : 1; }

INLINE int minima(const scaling how) { return how & MINIMA ? 1 : 0; }

/* The bytes of a header's row of scales; of all of a header; of the super-scales before each KT_SUPER_GROUP k. */
INLINE size_t scales_bytes(const scaling how) {
    const int kind = kind_of(how);
    return kind == NONE ? 0 : kind == PANEL ? LINE : kind == BF16 || kind == FP16 ? KT_PANEL * 2 : KT_PANEL;
}
INLINE size_t header_bytes(const scaling how) {
    return (1 + minima(how)) * halves(how) * scales_bytes(how) + (how & ZERO_POINTS ? KT_PANEL : 0);
}
INLINE size_t super_bytes(const scaling how) { return how & SUPER ? (1 + minima(how)) * KT_PANEL * 2 : 0; }

/* Floats of fewer bits, from the top of a dword on: moved to where fp32 has its exponent and mantissa, they are the number times a
 * small power of two, denormals included, which one exact multiplication undoes. */
INLINE f32v raise(const u32v top, const int down, const uint32_t keep, const float factor) {
    return (f32v)((u32v)((i32v)top >> down) & keep) * splat(factor);
}
INLINE f32v e4m3_at_top(const u32v top) { return raise(top, 4, 0x87F00000, 0x1p120f); }
INLINE f32v fp16_at_top(const u32v top) { return raise(top, 3, 0x8FFFE000, 0x1p112f); }
INLINE f32v load_fp16(const uint8_t *p) { return fp16_at_top(widen_u16(p) << 16); }

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

/* A row's numbers of the columns of vector v, as fp32. */
INLINE f32v load_row(const uint8_t *row, const int v, const scaling how) {
    switch (kind_of(how)) {
        case NONE: return splat(1); /* where sums are finished apart, since x has scales */
        case UE8M0: return load_ue8m0(row + v * LANES);
        case E4M3: return e4m3_at_top(widen_u8(row + v * LANES) << 24);
        case BF16: return (f32v)(widen_u16(row + v * LANES * 2) << 16);
        case FP16: return load_fp16(row + v * LANES * 2);
        case INT8: return __builtin_convertvector(widen_i8(row + v * LANES), f32v);
        default: return load_f32(row);
    }
}

/* Scales; half: of which 16 k, if there are two. */
INLINE f32v load_scales(const uint8_t *header, const int v, const int half, const scaling how) {
    return load_row(header + half * scales_bytes(how), v, how);
}

INLINE f32v load_minima(const uint8_t *header, const int v, const int half, const scaling how) {
    return load_row(header + (halves(how) + half) * scales_bytes(how), v, how);
}

/* What multiplies the scales and the minima of KT_SUPER_GROUP k, in the columns of vector v. */
typedef struct supers {
    f32v of_scales, of_minima;
} supers;

INLINE supers load_supers(const uint8_t *p, const int v, const scaling how) {
    return (supers){load_fp16(p + v * LANES * 2), how & MINIMA ? load_fp16(p + (KT_PANEL + v * LANES) * 2) : splat(0)};
}

/* Zero points of the columns of vector v, as integers. */
INLINE u32v load_zero_points(const uint8_t *header, const int v, const scaling how) {
    return widen_u8(header + halves(how) * scales_bytes(how) + v * LANES);
}

#endif
