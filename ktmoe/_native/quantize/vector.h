/* Vectors of four, by the compiler's vector extension: every CPU has them. */
#ifndef KT_QUANTIZE_VECTOR_H
#define KT_QUANTIZE_VECTOR_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum { LANES = 4 };

typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef uint32_t u32x4 __attribute__((vector_size(16)));
typedef double f64x2 __attribute__((vector_size(16)));
typedef float f32x2 __attribute__((vector_size(8)));
typedef int64_t i64x2 __attribute__((vector_size(16)));

INLINE f32x4 load_f32(const float *p) {
    f32x4 v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store_f32(float *p, f32x4 v) { memcpy(p, &v, sizeof v); }
INLINE void store_i32(int32_t *p, i32x4 v) { memcpy(p, &v, sizeof v); }

INLINE f64x2 load_f64(const double *p) {
    f64x2 v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* Two floats, as doubles. */
INLINE f64x2 load_wide(const float *p) {
    f32x2 v;
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, f64x2);
}

INLINE f32x4 splat(float x) { return (f32x4){x, x, x, x}; }

INLINE f32x4 select_f32(i32x4 where, f32x4 a, f32x4 b) { return (f32x4)((where & (i32x4)a) | (~where & (i32x4)b)); }
INLINE i32x4 select_i32(i32x4 where, i32x4 a, i32x4 b) { return (where & a) | (~where & b); }

INLINE i32x4 sign_of(f32x4 v) { return (i32x4)((u32x4)v & 0x80000000u); }
INLINE f32x4 size_of(f32x4 v) { return (f32x4)((i32x4)v & 0x7FFFFFFF); }
INLINE f32x4 signed_by(f32x4 size, i32x4 sign) { return (f32x4)((i32x4)size | sign); }

#endif
