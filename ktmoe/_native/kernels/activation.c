/* The gated activation and its derivative in the widest vectors of the instruction set. Full panels and tails run the same code; a
 * tail's other columns are set to 0.
 */
#include "kernels/common/exp.h"
#include "kernels/common/training.h"
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
    /* The power comes in two steps, since 2^128 and 2^-150 are no floats; the first is exact. */
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

typedef struct constants {
    f32v minus_alpha, limit, offset;
    i32v lane;
} constants;

INLINE constants constants_of(const kt_activation *act) {
    constants to = {splat(-act->alpha), splat(act->limit), splat(act->up_offset), {0}};
    for (int l = 0; l < LANES; l++) to.lane[l] = l;
    return to;
}

/* What activate() and derive() agree on to the bit. g and u: clamped. e: exp(-alpha g). */
typedef struct gated {
    f32v g, u, e, gate, value; /* gate = g / (1 + e), value = gate * (u + offset) */
} gated;

INLINE gated gated_of(const f32v g, const f32v u, const constants *with) {
    gated to = {.g = at_most(g, with->limit), .u = at_least(at_most(u, with->limit), -with->limit)};
    to.e = exp_f32(with->minus_alpha * to.g);
    to.gate = to.g / (1.0f + to.e);
    to.value = to.gate * (to.u + with->offset);
    return to;
}

INLINE void store_bf16(uint16_t *p, const u32v bits) {
    const u16v words = __builtin_convertvector(bits, u16v);
    memcpy(p, &words, sizeof words);
}

/* The lanes of columns c + lane < columns, whose memory alone is touched; the others are zero. */
INLINE f32v load_columns(const float *p, const int c, const int columns) {
    if (c + LANES <= columns) return load_f32(p + c);
    float lanes[LANES] = {0};
    for (int l = 0; c + l < columns; l++) lanes[l] = p[c + l];
    return load_f32(lanes);
}

INLINE void store_columns(float *p, const f32v v, const int c, const int columns) {
    if (c + LANES <= columns)
        store_f32(p + c, v);
    else
        for (int l = 0; c + l < columns; l++) p[c + l] = v[l];
}

void KT_NAME(activate)(const kt_activate *restrict a) {
    const constants with = constants_of(&a->act);
    const int columns = (int)a->columns;
    for (size_t i = 0; i < a->m; i++)
        for (int c = 0; c < KT_PANEL; c += LANES) {
            const f32v g = finish(load_f32(a->g + i * KT_PANEL + c), &a->finish_g, i, c);
            const f32v u = finish(load_f32(a->u + i * KT_PANEL + c), &a->finish_u, i, c);
            if (a->kept_g) {
                store_columns(a->kept_g + i * a->kept_stride, g, c, columns);
                store_columns(a->kept_u + i * a->kept_stride, u, c, columns);
            }
            f32v h = gated_of(g, u, &with).value;
            if (a->r) h *= splat(a->r[i]);
            store_bf16(a->h + i * a->h_stride + c, bf16_from_f32(h) & (u32v)(with.lane + c < columns));
        }
}

/* The sum of all lanes, by halves. */
INLINE float across(const f32v v) {
    float lanes[LANES];
    memcpy(lanes, &v, sizeof v);
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];
    return lanes[0];
}

/* The errors before the rounding to bf16, with z = alpha g', s = 1 / (1 + exp(-z)), eps = 2^-24 and normal numbers:
 *     dg = t (u' + offset) s (1 + z (1 - s))   within |t (u' + offset) s| (|1 + z (1 - s)| + |z (1 - s)|) (14 + |z|) eps
 *     du = t g' s                              within |t g' s| (9 + |z|) eps
 * 4 eps and |z| eps are exp's and its argument's; s below 2^-127 is 0. A gradient that a clamp stops is 0, be t what it may. */
void KT_NAME(derive)(const kt_derive *restrict d) {
    const constants with = constants_of(&d->act);
    const int columns = (int)d->columns;
    for (size_t i = 0; i < d->m; i++) {
        const f32v r = splat(d->r ? d->r[i] : 1.0f);
        f32v sum = splat(0);
        for (int c = 0; c < KT_PANEL; c += LANES) {
            const u32v inside = (u32v)(with.lane + c < columns);
            const f32v g = load_columns(d->g + i * d->stride, c, columns), u = load_columns(d->u + i * d->stride, c, columns);
            const f32v dh = (f32v)((u32v)load_f32(d->dh + i * KT_PANEL + c) & inside), t = dh * r;
            const gated of = gated_of(g, u, &with);
            /* 1 - s has no digits left where s is near 1. Beyond 128, exp is 0 or infinity, but z (1 - s) would be no number. */
            const f32v s = 1.0f / (1.0f + of.e), other = select_f32(of.e <= 1.0f, of.e * s, 1.0f - s);
            const f32v z = at_least(at_most(-with.minus_alpha * of.g, splat(128)), splat(-128));
            const f32v dg = t * ((of.u + with.offset) * s * (1.0f + z * other)), du = t * of.gate;
            const u32v stopped_g = (u32v)(g > with.limit), stopped_u = (u32v)((u > with.limit) | (u < -with.limit));
            const u32v h = bf16_from_f32(d->by_input ? of.value * r : of.value);
            store_bf16(d->dg + i * d->to_stride + c, bf16_from_f32(dg) & inside & ~stopped_g);
            store_bf16(d->du + i * d->to_stride + c, bf16_from_f32(du) & inside & ~stopped_u);
            store_bf16(d->h + i * d->to_stride + c, h & inside);
            const f32v seen = d->by_input ? of.value : (f32v)(h << 16);
            sum = multiply_add(dh, (f32v)((u32v)seen & inside), sum);
        }
        d->dr[i] = across(sum);
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
