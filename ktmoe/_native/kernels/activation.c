/* The gated activation in the widest vectors of the instruction set. Full panels and tails run the same code; a tail's other
 * columns are set to 0.
 */
#include "kernels/common/exp.h"
#include "kernels/common/isa.h"
#include "kernels/common/vector.h"

INLINE f32v power_of_two(i32v n) { return (f32v)((n + 127) << 23); }

INLINE f32v exp_f32(f32v t) {
    t = at_least(at_most(t, splat(KT_EXP_HIGH)), splat(KT_EXP_LOW));
    /* Adding 1.5 * 2^23 leaves the rounded integer in the low bits: no conversion that would be undefined for NaN. */
    const f32v shifted = t * KT_EXP_LOG2E + 0x1.8p23f, n = shifted - 0x1.8p23f;
    const i32v whole = (i32v)((u32v)shifted - 0x4B400000u), half = whole >> 1;
    f32v r = multiply_add(-n, splat(KT_EXP_LN2_HIGH), t);
    r = multiply_add(-n, splat(KT_EXP_LN2_LOW), r);
    f32v p = splat(KT_EXP_C6);
    p = multiply_add(p, r, splat(KT_EXP_C5));
    p = multiply_add(p, r, splat(KT_EXP_C4));
    p = multiply_add(p, r, splat(KT_EXP_C3));
    p = multiply_add(p, r, splat(KT_EXP_C2));
    p = multiply_add(p, r, splat(KT_EXP_C1));
    p = multiply_add(p, r, splat(1.0f));
    /* In two steps, since 2^128 and 2^-150 are no floats; the first is exact. */
    return p * power_of_two(half) * power_of_two(whole - half);
}

/* Round to nearest even by integers: VCVTNEPS2BF16 would flush denormals, and this is the same for all backends. */
INLINE u32v bf16_from_f32(f32v v) {
    const u32v bits = (u32v)v, rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return (u32v)select_f32(v != v, (f32v)(bits >> 16 | 0x40), (f32v)rounded);
}

INLINE f32v finish(f32v v, const kt_finish *f, size_t row, int c) {
    if (f->factor) v = f->divides ? v / load_f32(f->factor + c) : v * load_f32(f->factor + c);
    if (f->bias) v += load_f32(f->bias + c);
    if (f->added) v += load_f32(f->added + row * KT_PANEL + c);
    return v;
}

void KT_NAME(activate)(const kt_activate *restrict a) {
    const f32v alpha = splat(-a->act.alpha), limit = splat(a->act.limit), low = splat(-a->act.limit);
    const f32v offset = splat(a->act.up_offset);
    i32v lane;
    for (int l = 0; l < LANES; l++) lane[l] = l;
    for (size_t i = 0; i < a->m; i++)
        for (int c = 0; c < KT_PANEL; c += LANES) {
            const f32v g = at_most(finish(load_f32(a->g + i * KT_PANEL + c), &a->finish_g, i, c), limit);
            const f32v u = at_least(at_most(finish(load_f32(a->u + i * KT_PANEL + c), &a->finish_u, i, c), limit), low);
            f32v h = g / (1.0f + exp_f32(alpha * g)) * (u + offset);
            if (a->r) h *= splat(a->r[i]);
            const u32v inside = (u32v)(lane + c < (int)a->columns);
            const u16v bits = __builtin_convertvector(bf16_from_f32(h) & inside, u16v);
            memcpy(a->h + i * a->h_stride + c, &bits, sizeof bits);
        }
}

void KT_NAME(exp)(const float *restrict x, float *restrict y, size_t count) {
    for (size_t i = 0; i < count; i += LANES) {
        const size_t left = count - i < LANES ? count - i : LANES;
        float lanes[LANES] = {0};
        memcpy(lanes, x + i, left * sizeof *x);
        store_f32(lanes, exp_f32(load_f32(lanes)));
        memcpy(y + i, lanes, left * sizeof *y);
    }
}
