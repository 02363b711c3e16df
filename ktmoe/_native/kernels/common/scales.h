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
    UINT4,       /* likewise of 4 bits, two halves of a block in a byte */
    INT6,        /* likewise; the lower 4 bits plus 32 stand so, the upper 2 behind the super-scales */
    SUPER_ALONE, /* 1: there are only super-scales */
    KINDS = 15,  /* the bits of a kind */
    FOLDED = 16, /* scales are in the weights: one chain over all k */
    HALVES = 32, /* a scale of 16 k: two in a block */
    ZERO_POINTS = 64,
    MINIMA = 128, /* which stand as the scales do */
    SUPER = 256,  /* fp16 super-scales, of scales and of minima */
    CODE = 4096,  /* times the bits of a code, where a family has several sizes */
};
typedef int scaling;

INLINE int kind_of(const scaling how) { return how & KINDS; }
/* Whether a scale multiplies its group's sum. */
INLINE int in_groups(const scaling how) { return kind_of(how) != NONE && !(how & FOLDED); }
/* Whether decode() needs something of each group. */
INLINE int folds(const scaling how) { return how & (FOLDED | ZERO_POINTS); }
INLINE int halves(const scaling how) { return how & HALVES ? 2 : 1; }

INLINE int minima(const scaling how) { return how & MINIMA ? 1 : 0; }
INLINE int bits_of_code(const scaling how) { return how / CODE; }

/* Whether the scales of both halves of a block stand in one row. */
INLINE int in_nibbles(const scaling how) { return kind_of(how) == UINT4 || kind_of(how) == INT6; }

/* The bytes of a header's row of scales; of all of a header; of what stands before each KT_SUPER_GROUP k: super-scales, and the upper
 * bits of scales. */
INLINE size_t scales_bytes(const scaling how) {
    const int kind = kind_of(how);
    if (kind == NONE || kind == SUPER_ALONE) return 0;
    return kind == PANEL ? LINE : kind == BF16 || kind == FP16 ? KT_PANEL * 2 : KT_PANEL;
}
INLINE size_t header_bytes(const scaling how) {
    return (1 + minima(how)) * (in_nibbles(how) ? 1 : halves(how)) * scales_bytes(how) + (how & ZERO_POINTS ? KT_PANEL : 0);
}
INLINE size_t upper_bytes(const scaling how) { return kind_of(how) == INT6 ? KT_PANEL * 4 : 0; }
INLINE size_t super_bytes(const scaling how) { return (how & SUPER ? (1 + minima(how)) * KT_PANEL * 2 : 0) + upper_bytes(how); }

/* Floats of fewer bits, from the top of a dword on: moved to where fp32 has its exponent and mantissa, they are the number times a
 * small power of two, denormals included, which one exact multiplication undoes. */
INLINE f32v raise(const u32v top, const int down, const uint32_t keep, const float factor) {
    return (f32v)((u32v)((i32v)top >> down) & keep) * splat(factor);
}
INLINE f32v e4m3_at_top(const u32v top) { return raise(top, 4, 0x87F00000, 0x1p120f); }

/* fp16 numbers from the top of a dword on. Super-scales of weights of the usual size are denormal ones. As factors, denormal fp32 numbers
 * take long on some CPUs, so none is made here: where the exponent is 0, a subtraction undoes what stands in its place. */
INLINE f32v fp16_at_top(const u32v top) {
#if VECTOR_BYTES == 64
    return (f32v)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)(top >> 16)));
#else
    const u32v bits = top >> 3 & 0x0FFFE000,
               below = (u32v)((i32v)(bits - 0x00800000) >> 31); /* all bits where the exponent is 0 */
    const u32v small = (u32v)((f32v)(bits | 113 << 23) - splat(0x1p-14f)), normal = bits + (112 << 23);
    return (f32v)((top & 0x80000000) | (small & below) | (normal & ~below));
#endif
}
INLINE f32v load_fp16(const uint8_t *p) {
#if VECTOR_BYTES == 64
    return (f32v)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#else
    return fp16_at_top(widen_u16(p) << 16);
#endif
}

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

/* What multiplies the scales and the minima of KT_SUPER_GROUP k, in the columns of vector v; the upper bits of these scales, two of each
 * 16 k, from the lowest on. */
typedef struct supers {
    f32v of_scales, of_minima;
    u32v upper;
} supers;

INLINE supers load_supers(const uint8_t *p, const int v, const scaling how) {
    supers s = {.of_scales = load_fp16(p + v * LANES * 2)};
    if (how & MINIMA) s.of_minima = load_fp16(p + (KT_PANEL + v * LANES) * 2);
    if (upper_bytes(how)) s.upper = load_u32(p + (1 + minima(how)) * KT_PANEL * 2 + v * LANES * 4);
    return s;
}

/* Which number of a group: the 16 k `half` of its block, which is the block-th one of KT_SUPER_GROUP k. */
typedef struct in_group {
    int half;
    size_t block;
} in_group;

/* One of a header's numbers of the columns of vector v, as fp32. row: the first of them. */
INLINE f32v load_number(const uint8_t *row, const int v, const in_group at, const supers *s, const scaling how) {
    if (in_nibbles(how)) {
        u32v number = widen_u8(row + v * LANES);
        number = at.half ? number >> 4 : number & 15;
        if (kind_of(how) == UINT4) return __builtin_convertvector((i32v)number, f32v);
        const u32v upper = s->upper >> (uint32_t)(4 * at.block + 2 * (size_t)at.half) & 3;
        return __builtin_convertvector((i32v)(number | upper << 4) - 32, f32v);
    }
    row += at.half * scales_bytes(how);
    switch (kind_of(how)) {
        case NONE:
        case SUPER_ALONE: return splat(1); /* of NONE where sums are finished apart, since x has scales */
        case UE8M0: return load_ue8m0(row + v * LANES);
        case E4M3: return e4m3_at_top(widen_u8(row + v * LANES) << 24);
        case BF16: return (f32v)(widen_u16(row + v * LANES * 2) << 16);
        case FP16: return load_fp16(row + v * LANES * 2);
        case INT8: return __builtin_convertvector(widen_i8(row + v * LANES), f32v);
        default: return load_f32(row);
    }
}

/* A scale, and a minimum, with its super-scale multiplied in. */
INLINE f32v load_scale(const uint8_t *header, const int v, const in_group at, const supers *s, const scaling how) {
    const f32v scale = load_number(header, v, at, s, how);
    return !(how & SUPER) ? scale : kind_of(how) == SUPER_ALONE ? s->of_scales : scale * s->of_scales;
}
INLINE f32v load_minimum(const uint8_t *header, const int v, const in_group at, const supers *s, const scaling how) {
    const f32v minimum = load_number(header + header_bytes(how) / 2, v, at, s, how);
    return how & SUPER ? minimum * s->of_minima : minimum;
}

/* Zero points of the columns of vector v, as integers. */
INLINE u32v load_zero_points(const uint8_t *header, const int v, const scaling how) {
    return widen_u8(header + halves(how) * scales_bytes(how) + v * LANES);
}

#endif
