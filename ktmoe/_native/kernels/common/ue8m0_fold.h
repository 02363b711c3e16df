/* UE8M0 scales as what VPSUBUSW takes from bf16 weights in pairs; kt_codebook.folded and e4m3_bf16.h say why. */
#ifndef KT_UE8M0_FOLD_H
#define KT_UE8M0_FOLD_H

#include <immintrin.h>
#include <stdint.h>

/* What is taken from both weights of each of 16 columns: (from - b) << 7. */
static inline __m512i ue8m0_fold(const uint8_t *scales, const short from) {
/* Byte i to both words of lane i, zero above it. */
#define LANE(i) (int)(0x80008000u | (i) * 0x00010001u)
    const __m512i spread = _mm512_setr_epi32(LANE(0), LANE(1), LANE(2), LANE(3), LANE(4), LANE(5), LANE(6), LANE(7), LANE(8),
                                             LANE(9), LANE(10), LANE(11), LANE(12), LANE(13), LANE(14), LANE(15));
#undef LANE
    const __m512i b = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)scales)), spread);
    return _mm512_slli_epi16(_mm512_sub_epi16(_mm512_set1_epi16(from), b), 7);
}

#endif
