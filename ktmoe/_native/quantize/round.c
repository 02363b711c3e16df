/* SHAPES      weights [n, k] in rows; groups of rows x columns share a step.
 * DEFINITION  for each row: for each chunk of 256 k:
 *                 t = quotients(w, the groups' steps)
 *                 code, number = nearest(t)
 *                 error += (w - number * scale * factor)^2
 * LAYOUT      codes are bytes, or two a byte, low nibble = even k.
 * REGULARITIES every loop runs over a whole chunk, so that compilers make vectors of it; a chunk's tail is zeros, whose error is 0.
 */
#include "quantize/round.h"

#include "base/cpu.h"
#include "quantize/e4m3.h"

/* A chunk: weights, quotients, the numbers that codes stand for, what groups have, codes. */
typedef struct chunk {
    float w[KT_CHUNK], t[KT_CHUNK], number[KT_CHUNK], more[KT_CHUNK];
    double value[KT_CHUNK];
    int32_t code[KT_CHUNK];
} chunk;

/* A size to the nearest integer: adding 2^23 rounds to even. Above 2^22 it need not be the nearest. */
INLINE f32x4 whole(f32x4 size, kt_ties ties) {
    const f32x4 even = (size + 0x1p23f) - 0x1p23f;
    if (ties == KT_TIES_AWAY) return even + (f32x4)((size - even == 0.5f) & (i32x4)splat(1));
    if (ties == KT_TIES_ZERO) return even - (f32x4)((size - even == -0.5f) & (i32x4)splat(1));
    return even;
}

static void quotients(const kt_rounding *how, size_t group, size_t first, size_t count, chunk *restrict c) {
    const float *factors = c->w;
    if (how->multipliers) {
        kt_spread(how->multipliers + group, how->columns, first, count, 1, c->more);
        for (size_t i = 0; i < KT_CHUNK; i++) c->t[i] = c->w[i] * c->more[i];
        factors = c->t;
    }
    kt_spread(how->divisors + group, how->columns, first, count, 1, c->more);
    for (size_t i = 0; i < KT_CHUNK; i++) c->t[i] = factors[i] / c->more[i];
    if (!how->sixteenths) return;
    for (size_t i = 0; i < KT_CHUNK; i += LANES) {
        const f32x4 t = load_f32(c->t + i);
        store_f32(c->t + i, signed_by(whole(size_of(t), KT_TIES_EVEN) * 0.0625f, sign_of(t)));
    }
}

/* Rounds w / divisor in float64 to the nearest integer, ties away from zero; the integer stands in t, where float32 is
 * exact. */
static void quotients_float64(const kt_rounding *how, size_t group, size_t first, size_t count, chunk *restrict c) {
    kt_spread(how->divisors + group, how->columns, first, count, 1, c->more);
    for (size_t i = 0; i < KT_CHUNK; i += 2) {
        const f64x2 t = load_wide(c->w + i) / load_wide(c->more + i);
        const f64x2 size = (f64x2)((i64x2)t & INT64_MAX), even = (size + 0x1p52) - 0x1p52;
        const f64x2 nearest = even + (f64x2)((size - even == 0.5) & (i64x2)(f64x2){1, 1});
        const f64x2 found = (f64x2)((i64x2)nearest | ((i64x2)t & INT64_MIN));
        c->t[i] = (float)found[0], c->t[i + 1] = (float)found[1];
    }
}

INLINE void integers_by(const kt_rounding *how, kt_ties ties, chunk *restrict c) {
    const f32x4 least = splat(how->least), most = splat(how->most);
    const int32_t plus = (int32_t)how->plus;
    for (size_t i = 0; i < KT_CHUNK; i += LANES) {
        const f32x4 t = load_f32(c->t + i);
        f32x4 number = signed_by(whole(size_of(t), ties), sign_of(t));
        number = select_f32(number < least, least, number);
        number = select_f32(number > most, most, number);
        store_f32(c->number + i, number);
        store_i32(c->code + i, __builtin_convertvector(number, i32x4) + plus);
    }
}

static void integers(const kt_rounding *how, size_t group, size_t first, size_t count, chunk *restrict c) {
    if (how->points) {
        kt_spread(how->points + group, how->columns, first, count, 0, c->more);
        for (size_t i = 0; i < KT_CHUNK; i++) c->t[i] += c->more[i];
    }
    switch (how->ties) {
        case KT_TIES_EVEN: integers_by(how, KT_TIES_EVEN, c); break;
        case KT_TIES_AWAY: integers_by(how, KT_TIES_AWAY, c); break;
        case KT_TIES_ZERO: integers_by(how, KT_TIES_ZERO, c); break;
    }
    if (how->points)
        for (size_t i = 0; i < KT_CHUNK; i++) c->number[i] -= c->more[i];
}

/* Codes 0 to 7 stand for 0, 1, 2, 3, 4, 6, 8, 12 halves. */
static void e2m1(const kt_rounding *how, chunk *restrict c) {
    const i32x4 of_zero = how->negative_zero ? (i32x4){8, 8, 8, 8} : (i32x4){0};
    const i32x4 zero_signed = how->zero_signed ? ~(i32x4){0} : (i32x4){0};
    f32x4 limits[KT_E2M1_LIMITS];
    for (size_t l = 0; l < KT_E2M1_LIMITS; l++) limits[l] = splat(how->limits[l]);
    for (size_t i = 0; i < KT_CHUNK; i += LANES) {
        const f32x4 t = load_f32(c->t + i), size = size_of(t);
        i32x4 code = {0};
        for (size_t l = 0; l < KT_E2M1_LIMITS; l++) code -= size >= limits[l];
        const i32x4 six = size >= limits[6], halves = code - (size >= limits[4]) - (size >= limits[5]) - six - six - six;
        const i32x4 sign = sign_of(t) & ((t < 0) | zero_signed), eight = select_i32(code == 0, of_zero, (i32x4){8, 8, 8, 8});
        store_f32(c->number + i, signed_by(__builtin_convertvector(halves, f32x4) * 0.5f, sign));
        store_i32(c->code + i, code | ((sign >> 31) & eight));
    }
}

static void e4m3(chunk *restrict c) {
    for (size_t i = 0; i < KT_CHUNK; i += LANES) {
        const f32x4 t = load_f32(c->t + i);
        const i32x4 sign = sign_of(t);
        i32x4 code;
        store_f32(c->number + i, signed_by(nearest_e4m3(size_of(t), &code), sign));
        store_i32(c->code + i, code | ((sign >> 24) & 0x80));
    }
}

/* Sums of (w - w')^2 and w^2, each in four parts. */
static void add_error(const kt_rounding *how, size_t group, size_t first, size_t count, chunk *restrict c, f64x2 sums[4]) {
    kt_spread_f64(how->values + group, how->columns, first, count, c->value);
    for (size_t i = 0; i < KT_CHUNK; i += 4)
        for (size_t half = 0; half < 2; half++) {
            const f64x2 w = load_wide(c->w + i + 2 * half);
            const f64x2 off = w - load_wide(c->number + i + 2 * half) * load_f64(c->value + i + 2 * half);
            sums[half] += off * off;
            sums[2 + half] += w * w;
        }
}

static void store(const kt_rounding *how, const chunk *restrict c, size_t count, uint8_t *restrict codes) {
    uint8_t bytes[KT_CHUNK];
    if (how->code_bits == 8) {
        for (size_t i = 0; i < KT_CHUNK; i++) bytes[i] = (uint8_t)c->code[i];
        memcpy(codes, bytes, count);
        return;
    }
    uint16_t pairs[KT_CHUNK / 2];
    for (size_t i = 0; i < KT_CHUNK; i++) bytes[i] = (uint8_t)c->code[i];
    memcpy(pairs, bytes, sizeof pairs);
    for (size_t i = 0; i < KT_CHUNK / 2; i++) bytes[i] = (uint8_t)(pairs[i] | pairs[i] >> 4);
    memcpy(codes, bytes, count / 2);
}

void kt_round_weights(const kt_weights *m, const kt_rounding *how, size_t row, size_t count, uint8_t *restrict codes,
                      double sums[2]) {
    const unsigned state = kt_fp_enter();
    const size_t groups = (m->k + how->columns - 1) / how->columns;
    f64x2 parts[4] = {0};
    chunk c;
    for (size_t i = 0; i < count; i++)
        for (size_t first = 0; first < m->k; first += KT_CHUNK) {
            const size_t left = m->k - first, some = left < KT_CHUNK ? left : KT_CHUNK, group = i / how->rows * groups;
            kt_weights_read(m, row + i, first, some, c.w);
            if (how->float64)
                quotients_float64(how, group, first, some, &c);
            else
                quotients(how, group, first, some, &c);
            switch (how->to) {
                case KT_TO_INTEGERS: integers(how, group, first, some, &c); break;
                case KT_TO_E2M1: e2m1(how, &c); break;
                case KT_TO_E4M3: e4m3(&c); break;
            }
            if (sums) add_error(how, group, first, some, &c, parts);
            store(how, &c, some, codes + ((row + i) * m->k + first) * how->code_bits / 8);
        }
    for (size_t s = 0; sums && s < 2; s++) {
        const f64x2 sum = parts[2 * s] + parts[2 * s + 1];
        sums[s] = sum[0] + sum[1];
    }
    kt_fp_leave(state);
}
