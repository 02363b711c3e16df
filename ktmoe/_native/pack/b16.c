/* Packing b16, bfloat16 weights: rows of words to panels and back, exactly.
 *
 * LAYOUT of a panel: blocks in ascending k, each 16 k-pairs of 64 columns of two bf16:
 *
 *     weight of (column c, k) at  (k % 32 / 2) * 256 + c * 4 + (k % 2) * 2
 *
 * the pair order of VDPBF16PS and TDPBF16PS. Padding is zero.
 */
#include "ktmoe.h"
#include "pack/pack.h"
#include "pack/transpose.h"

enum { PAIR_BYTES = KT_PANEL * 4, BLOCK_BYTES = KT_BLOCK / 2 * PAIR_BYTES, ROW_BYTES = KT_BLOCK * 2, LINE_STEP = PAIR_BYTES };

static inline size_t column_at(size_t column) { return column * 4; }

ALWAYS_INLINE u32x4 pack_four(const kt_format *f, const uint8_t *from, size_t stride_bytes, uint8_t *to) {
    (void)f;
    u32x4 infinite = {0}; /* bits 15 and 31: an exponent of all ones was seen */
    /* Unrolled, GCC checks at the end and keeps rows on the stack until then: 0.7 of the speed. */
#pragma GCC unroll 1
    for (int four = 0; four < 4; four++) {
        u32x4 v[4];
        for (int i = 0; i < 4; i++) {
            memcpy(&v[i], from + i * stride_bytes + four * sizeof v[i], sizeof v[i]);
            infinite |= (v[i] & 0x7F807F80) + 0x00800080;
        }
        store_transposed(v, to + four * 4 * 64, 64);
    }
    return infinite & 0x80008000;
}

ALWAYS_INLINE void unpack_four(const kt_format *f, const uint8_t *from, uint8_t *to, size_t stride_bytes) {
    (void)f;
    for (int four = 0; four < 4; four++) {
        u32x4 v[4];
        for (int j = 0; j < 4; j++) memcpy(&v[j], from + (four * 4 + j) * PAIR_BYTES, sizeof v[j]);
        store_transposed(v, to + four * sizeof v[0], stride_bytes);
    }
}

#include "pack/panels.h"

const kt_packing kt_pack_b16 = {"b16", 1, 16, BLOCK_BYTES, pack_codes, unpack_codes};
