/* The gated activation in AVX-512: full vectors and tails run the same code, the tail's lanes masked at the store. */
#include <immintrin.h>

#include "kernels/avx512_bf16/kernels.h"
#include "kernels/exp.h"

static inline __m512 exp_f32x16(__m512 t) {
    /* min and max give their second operand where one is NaN, so NaN passes. */
    t = _mm512_max_ps(_mm512_set1_ps(KT_EXP_LOW), _mm512_min_ps(_mm512_set1_ps(KT_EXP_HIGH), t));
    const __m512 n =
        _mm512_roundscale_ps(_mm512_mul_ps(t, _mm512_set1_ps(KT_EXP_LOG2E)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(KT_EXP_LN2_HIGH), t);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(KT_EXP_LN2_LOW), r);
    __m512 p = _mm512_set1_ps(KT_EXP_C6);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(KT_EXP_C5));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(KT_EXP_C4));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(KT_EXP_C3));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(KT_EXP_C2));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(KT_EXP_C1));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

/* Round to nearest even by integers: VCVTNEPS2BF16 would flush denormals, and this is the same for all backends. */
static inline __m256i bf16_from_f32x16(__m512 v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
    const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
    rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), quiet);
    return _mm512_cvtepi32_epi16(rounded);
}

void kt_activate_avx512_bf16(const kt_activate *restrict a) {
    const __m512 alpha = _mm512_set1_ps(-a->act.alpha), limit = _mm512_set1_ps(a->act.limit);
    const __m512 low = _mm512_set1_ps(-a->act.limit), offset = _mm512_set1_ps(a->act.up_offset);
    for (size_t i = 0; i < a->m; i++) {
        for (size_t c = 0; c < KT_PANEL; c += 16) {
            __m512 g = _mm512_load_ps(a->g + i * KT_PANEL + c), u = _mm512_load_ps(a->u + i * KT_PANEL + c);
            if (a->bias_g) g = _mm512_add_ps(g, _mm512_loadu_ps(a->bias_g + c));
            if (a->bias_u) u = _mm512_add_ps(u, _mm512_loadu_ps(a->bias_u + c));
            g = _mm512_min_ps(limit, g);
            u = _mm512_max_ps(low, _mm512_min_ps(limit, u));
            const __m512 e = exp_f32x16(_mm512_mul_ps(alpha, g));
            __m512 h = _mm512_div_ps(g, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
            h = _mm512_mul_ps(h, _mm512_add_ps(u, offset));
            if (a->r) h = _mm512_mul_ps(h, _mm512_set1_ps(a->r[i]));
            const size_t valid = a->columns > c ? a->columns - c : 0;
            const __mmask16 keep = valid >= 16 ? 0xFFFF : (__mmask16)((1u << valid) - 1);
            _mm256_storeu_si256((__m256i *)(a->h + i * a->h_stride + c), _mm256_maskz_mov_epi16(keep, bf16_from_f32x16(h)));
        }
    }
}

void kt_exp_avx512_bf16(const float *restrict x, float *restrict y, size_t count) {
    for (size_t i = 0; i < count; i += 16) {
        const __mmask16 keep = count - i >= 16 ? 0xFFFF : (__mmask16)((1u << (count - i)) - 1);
        _mm512_mask_storeu_ps(y + i, keep, exp_f32x16(_mm512_maskz_loadu_ps(keep, x + i)));
    }
}
