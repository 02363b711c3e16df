/* Packing b16, bfloat16 weights: a checkpoint's bytes to panels and back, exactly.
 *
 * LAYOUT of a panel: k-pairs in ascending k, each 64 columns of two bf16:
 *
 *     weight of (column c, k) at  (k / 2) * 256 + c * 4 + (k % 2) * 2
 *
 * the pair order of VDPBF16PS and TDPBF16PS. k is padded to 32; padding is zero.
 */
#include "base/numbers.h"
#include "ktmoe.h"
#include "pack/pack.h"
#include "pack/transpose.h"

enum { PAIR_BYTES = KT_PANEL * 4, STEP = 8 /* k of four dwords */ };

static size_t panel_bytes(const kt_format *f, size_t k) {
    (void)f;
    return kt_round_up(k, KT_BLOCK) / 2 * PAIR_BYTES;
}

static inline u32x4 load_tail(const kt_stored *s, size_t row, size_t k) {
    u32x4 v = {0};
    if (row < s->n && k < s->k)
        memcpy(&v, s->codes + row * s->codes_stride_bytes + k * 2, (s->k - k < STEP ? s->k - k : STEP) * 2);
    return v;
}

/* 16 rows together fill a cache line of the panel; 32 k of each fill one of the source. */
static void pack_panel(const kt_stored *s, size_t panel, uint8_t *packed, kt_scan *scan) {
    const size_t k_padded = kt_round_up(s->k, KT_BLOCK);
    u32x4 infinite = {0}; /* bits 15 and 31: an exponent of all ones was seen */
    for (size_t sixteen = 0; sixteen < KT_PANEL; sixteen += 16)
        for (size_t line = 0; line < k_padded; line += KT_BLOCK)
            for (size_t column = sixteen; column < sixteen + 16; column += 4) {
                const size_t row = panel * KT_PANEL + column;
                for (size_t k = line; k < line + KT_BLOCK; k += STEP) {
                    u32x4 v[4];
                    for (size_t i = 0; i < 4; i++) {
                        if (row + 4 <= s->n && k + STEP <= s->k)
                            memcpy(&v[i], s->codes + (row + i) * s->codes_stride_bytes + k * 2, sizeof v[i]);
                        else
                            v[i] = load_tail(s, row + i, k);
                        infinite |= (v[i] & 0x7F807F80) + 0x00800080;
                    }
                    store_transposed(v, packed + k / 2 * PAIR_BYTES + column * 4, PAIR_BYTES);
                }
            }
    scan->refused |= ((infinite[0] | infinite[1] | infinite[2] | infinite[3]) & 0x80008000) != 0;
}

static void unpack_panel(const kt_format *f, const uint8_t *packed, size_t rows, size_t k, uint8_t *codes, uint8_t *scales) {
    (void)f, (void)scales;
    for (size_t column = 0; column < rows; column += 4)
        for (size_t i = 0; i < k; i += STEP) {
            const size_t columns = rows - column < 4 ? rows - column : 4, count = k - i < STEP ? k - i : STEP;
            uint8_t *to = codes + (column * k + i) * 2;
            u32x4 v[4];
            for (size_t j = 0; j < 4; j++) memcpy(&v[j], packed + (i / 2 + j) * PAIR_BYTES + column * 4, sizeof v[j]);
            if (columns == 4 && count == STEP) {
                store_transposed(v, to, k * 2);
                continue;
            }
            uint8_t tail[4][STEP * 2];
            store_transposed(v, tail[0], sizeof tail[0]);
            for (size_t c = 0; c < columns; c++) memcpy(to + c * k * 2, tail[c], count * 2);
        }
}

const kt_packing kt_pack_b16 = {"b16", 16, panel_bytes, pack_panel, unpack_panel};
