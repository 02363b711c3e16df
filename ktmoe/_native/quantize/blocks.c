/* DEFINITION  for each block of 32 bf16 x: M = the largest |x|, e as kt_block_rule has it;
 *                 for each x: t = x / 2^e; code = the element's number nearest to t; x = that number * 2^e
 *             Every number is a bf16 number: x is a multiple of 2^-133, and so t one of 2^-133 / 2^e. Where the element is finer
 *             than that, t is one of its numbers.
 * REGULARITIES Bits of normal numbers t and of t * 2^e differ by those of 1 and of 2^e, so that 16-bit lanes suffice. E2M1's blocks of
 *             other numbers are computed 2^64 times as large; E4M3's, and those with t below 2^-6, in fp32.
 */
#include "quantize/blocks.h"

#include "base/numbers.h"
#include "quantize/e4m3.h"

enum {
    SIGN = 0x8000,
    NAN_BITS = 0x7FC0,
    OF_ZEROS = 127, /* any scale's byte for which bits suffice */
    LEAST_E2M1 = 3, /* the least one */
    LEAST_E4M3 = 7,
    LIFT = 64
};

typedef int16_t i16x8 __attribute__((vector_size(16)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));

INLINE i16x8 load_i16(const uint16_t *p) {
    i16x8 v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store_i16(uint16_t *p, i16x8 v) { memcpy(p, &v, sizeof v); }
INLINE i16x8 splat_i16(int x) { return (i16x8){0} + (int16_t)x; }

static inline float power_of_two(unsigned byte) {
    const uint32_t bits = byte ? byte << 23 : 1 << 22;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The bits of the largest one, without a sign. */
static inline unsigned largest(const uint16_t *x) {
    int16_t most = 0;
    for (size_t i = 0; i < KT_BLOCK; i++) {
        const int16_t size = (int16_t)(x[i] & ~SIGN);
        most = size > most ? size : most;
    }
    return (unsigned)most;
}

static inline unsigned scale_of(const kt_block_rule *rule, unsigned most) {
    const unsigned field = most >> 7, fraction = most & 127;
    if (!most) return rule->zeros;
    if (field == 255) return KT_NO_NUMBER;
    const int byte = (int)field - (rule->e2m1 ? 2 : 8) + (fraction >= rule->up) - (fraction < rule->down);
    return byte < 0 ? 0 : (unsigned)byte;
}

/* Numbers and codes of E2M1, of a scale of LEAST_E2M1 or more. The bits of sizes 1, 1.5, 2, 3, 4 and 6 are 64 apart, of 0.5 and 1 128. */
INLINE void e2m1(const kt_block_rule *rule, unsigned byte, const uint16_t *x, uint16_t *number, uint16_t *code) {
    static const int16_t middles[KT_E2M1_TIES] = {-256, -64, 32, 96, 160, 224, 288}; /* 0.25 to 5, less 1 */
    const i16x8 one = splat_i16((int)byte << 7), half = one - 128, any_sign = splat_i16(rule->negative_zero ? -1 : 0);
    i16x8 limits[KT_E2M1_TIES];
    for (size_t l = 0; l < KT_E2M1_TIES; l++) limits[l] = splat_i16(middles[l] - rule->up_at[l]);
    for (size_t i = 0; i < KT_BLOCK; i += 8) {
        const i16x8 v = load_i16(x + i), size = (v & (int16_t)~SIGN) - one, some = size > limits[0],
                    from_one = size > limits[1];
        i16x8 more = from_one;
        for (size_t l = 2; l < KT_E2M1_TIES; l++) more += size > limits[l];
        const i16x8 sign = v & (int16_t)SIGN & (some | any_sign);
        if (number) store_i16(number + i, ((some & half) + (from_one & 64) - more * 64) | sign);
        if (code) store_i16(code + i, (i16x8)((u16x8)sign >> 12) - some - more);
    }
}

/* Rounds a block to E2M1 with any scale; a small one is lifted first. */
INLINE void e2m1_block(const kt_block_rule *rule, unsigned byte, const uint16_t *x, uint16_t *number, uint16_t *code) {
    if (byte >= LEAST_E2M1) {
        e2m1(rule, byte, x, number, code);
        return;
    }
    uint16_t lifted[KT_BLOCK];
    for (size_t i = 0; i < KT_BLOCK; i++) lifted[i] = kt_bf16_from_f32(kt_bf16_to_f32(x[i]) * 0x1p64f);
    e2m1(rule, byte + LIFT, lifted, lifted, code);
    for (size_t i = 0; number && i < KT_BLOCK; i++) number[i] = kt_bf16_from_f32(kt_bf16_to_f32(lifted[i]) * 0x1p-64f);
}

/* Four bf16 as fp32. */
INLINE f32x4 widened(u16x8 v, bool last) {
    const u16x8 zero = {0};
    return (f32x4)(last ? __builtin_shuffle(zero, v, (u16x8){0, 12, 1, 13, 2, 14, 3, 15})
                        : __builtin_shuffle(zero, v, (u16x8){0, 8, 1, 9, 2, 10, 3, 11}));
}

/* Whether there is a number below 2^-6 of the scale, and not zero. */
INLINE bool has_small(const uint16_t *x, i16x8 least) {
    i16x8 small = {0};
    for (size_t i = 0; i < KT_BLOCK; i += 8) {
        const i16x8 size = load_i16(x + i) & (int16_t)~SIGN;
        small |= (size < least) & (size != 0);
    }
    const i64x2 both = (i64x2)small;
    return both[0] | both[1];
}

/* Rounds to E4M3 where no number is that small: the last 4 bits are rounded away. */
INLINE void e4m3(const kt_block_rule *rule, i16x8 one, const uint16_t *x, uint16_t *number, uint16_t *code) {
    const i16x8 largest = one + (8 * 128 + 96), any_sign = splat_i16(rule->negative_zero ? -1 : 0);
    for (size_t i = 0; i < KT_BLOCK; i += 8) {
        const i16x8 v = load_i16(x + i), size = v & (int16_t)~SIGN, some = size != 0;
        const i16x8 even = (size + 7 + (size >> 4 & 1)) & -16, over = even > largest;
        const i16x8 nearest = (over & largest) | (~over & even), sign = v & (int16_t)SIGN & (some | any_sign);
        if (number) store_i16(number + i, nearest | sign);
        if (code) store_i16(code + i, ((((nearest - one) >> 4) + (7 << 3)) & some) | (i16x8)((u16x8)sign >> 8));
    }
}

INLINE void e4m3_block(const kt_block_rule *rule, unsigned byte, const uint16_t *x, uint16_t *number, uint16_t *code) {
    const i16x8 one = splat_i16((int)byte << 7);
    if (byte >= LEAST_E4M3 && !has_small(x, one - 6 * 128)) {
        e4m3(rule, one, x, number, code);
        return;
    }
    const f32x4 scale = splat(power_of_two(byte)), inverse = splat(power_of_two(254 - byte));
    for (size_t i = 0; i < KT_BLOCK; i += 8) {
        const u16x8 v = (u16x8)load_i16(x + i), sizes = v & (uint16_t)~SIGN;
        i32x4 codes[2];
        const f32x4 first = nearest_e4m3(widened(sizes, false) * inverse, &codes[0]) * scale;
        const f32x4 last = nearest_e4m3(widened(sizes, true) * inverse, &codes[1]) * scale;
        const u16x8 upper = __builtin_shuffle((u16x8)first, (u16x8)last, (u16x8){1, 3, 5, 7, 9, 11, 13, 15});
        const u16x8 lower = __builtin_shuffle((u16x8)codes[0], (u16x8)codes[1], (u16x8){0, 2, 4, 6, 8, 10, 12, 14});
        const u16x8 sign = v & SIGN & ((u16x8)(lower != 0) | (uint16_t)-rule->negative_zero);
        if (number) store_i16(number + i, (i16x8)(upper | sign));
        if (code) store_i16(code + i, (i16x8)(lower | sign >> 8));
    }
}

static inline unsigned block(const kt_block_rule *rule, const uint16_t *x, uint16_t *number, uint16_t *code) {
    const unsigned most = largest(x), byte = scale_of(rule, most), by = most ? byte : OF_ZEROS;
    if (byte == KT_NO_NUMBER)
        for (size_t i = 0; i < KT_BLOCK; i++) *(number ? number + i : code + i) = number ? NAN_BITS : 0;
    else if (rule->e2m1)
        e2m1_block(rule, by, x, number, code);
    else
        e4m3_block(rule, by, x, number, code);
    return byte;
}

void kt_blocks_round(const kt_block_rule *rule, uint16_t *x, size_t count) {
    for (size_t i = 0; i < count; i += KT_BLOCK) block(rule, x + i, x + i, NULL);
}

void kt_blocks_quantize(const kt_block_rule *rule, const uint16_t *x, size_t count, uint8_t *codes, uint8_t *scales) {
    uint16_t code[KT_BLOCK];
    for (size_t i = 0; i < count; i += KT_BLOCK) {
        *scales++ = (uint8_t)block(rule, x + i, NULL, code);
        for (size_t c = 0; !rule->e2m1 && c < KT_BLOCK; c++) *codes++ = (uint8_t)code[c];
        for (size_t c = 0; rule->e2m1 && c < KT_BLOCK; c += 2) *codes++ = (uint8_t)(code[c] | code[c + 1] << 4);
    }
}

void kt_blocks_values(bool e2m1, const float *values, const uint8_t *codes, const uint8_t *scales, size_t count, uint16_t *x) {
    for (size_t i = 0; i < count; i++) {
        const unsigned byte = scales[i / KT_BLOCK], code = e2m1 ? codes[i / 2] >> (i % 2 * 4) & 15 : codes[i];
        x[i] = byte == KT_NO_NUMBER ? NAN_BITS : kt_bf16_from_f32(values[code] * power_of_two(byte));
    }
}
