/* q4 in fp32: a vector lookup gives fp32 weights; see f32.h and panel.h.
 *
 * LAYOUT      pack/q4.c. A code dword holds 8 k of one column; the nibble of k is at bit nibble_bit(k).
 */
#include "kernels/common/f32.h"
#include "kernels/common/q4_layout.h"

INLINE int nibble_bit(const int k) { return k / 2 * 4 + k % 2 * 16; }

#if VECTOR_BYTES == 64
typedef __m512 table;

INLINE table load_table(const kt_dot *a, const enum scale_kind kind) { return (void)kind, _mm512_loadu_ps(a->codebook->value); }

/* VPERMPS reads four index bits, so that what stands above the nibble does not matter. */
INLINE f32v lookup(const u32v codes, const int bit, const table *t) {
    return (f32v)_mm512_permutexvar_ps((__m512i)(codes >> bit), *t);
}
#elif VECTOR_BYTES == 32
typedef struct table {
    __m256 low, high;
} table;

INLINE table load_table(const kt_dot *a, const enum scale_kind kind) {
    (void)kind;
    return (table){_mm256_loadu_ps(a->codebook->value), _mm256_loadu_ps(a->codebook->value + 8)};
}

/* VPERMPS reads three index bits; the nibble's fourth chooses between two lookups, as the sign that VBLENDVPS reads. */
INLINE f32v lookup(const u32v codes, const int bit, const table *t) {
    const __m256i index = (__m256i)(codes >> bit);
    const __m256 low = _mm256_permutevar8x32_ps(t->low, index), high = _mm256_permutevar8x32_ps(t->high, index);
    return (f32v)_mm256_blendv_ps(low, high, (__m256)(codes << (28 - bit)));
}
#else
typedef const float *table;

INLINE table load_table(const kt_dot *a, const enum scale_kind kind) { return (void)kind, a->codebook->value; }

INLINE f32v lookup(const u32v codes, const int bit, const table *t) {
    f32v v;
    for (int l = 0; l < LANES; l++) v[l] = (*t)[codes[l] >> bit & 15];
    return v;
}
#endif

INLINE u32v decode(const uint8_t *octet, const int v, const int k, const enum scale_kind kind, const table *t, const fold *f) {
    (void)kind, (void)f;
    return (u32v)lookup(load_u32(codes_at(octet, v)), nibble_bit(k), t);
}

#include "kernels/loops/panel.h"

FORMS(ue8m0, UE8M0_SCALES)
FORMS(bf16, BF16_SCALES)

#define Q4 .family = "q4", .rows = &KT_NAME(rows_f32), .few_max = FEW_MAX, .scratch_bytes = sizeof(decoded_panel)
const kt_kernel KT_NAME(q4_f32)[] = {
    {Q4, .scale = "ue8m0", .scale_group_max = KT_BLOCK, .few = few_ue8m0, .many = many_ue8m0},
    {Q4, .scale = "bf16", .scale_group_max = KT_SCALE_GROUP_MAX, .few = few_bf16, .many = many_bf16},
    {0},
};
