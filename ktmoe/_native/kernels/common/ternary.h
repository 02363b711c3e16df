/* Records of digits to base 3 as q4's blocks.
 *
 * DEFINITION  digit d of a byte is the (d + 1)-th one behind the point of byte / 256, and a code: 3^d times the byte, the lower 8 bits of
 *             that times 3, the upper bits of this.
 *             Of 256 k, byte i, digit d:   0 to 159    k = 32 d + i           of bytes 0 to 31
 *                                          to 239      k = 160 + 16 d + i     of 16 bytes more
 *                                          to 255      k = 240 + 4 d + i      of 4 bytes more
 * LAYOUT      columns.h's; the scales stand as super-scales do
 */
#ifndef KT_TERNARY_H
#define KT_TERNARY_H

#include "kernels/common/columns.h"

/* A code of each column of a vector. */
INLINE u8w digit_of(const uint8_t *record, const size_t k) {
    static const uint16_t powers[] = {1, 3, 9, 27, 81};
    const size_t digit = k < 160 ? k / 32 : k < 240 ? (k - 160) / 16 : (k - 240) / 4;
    const size_t byte = k < 160 ? k % 32 : k < 240 ? 32 + k % 16 : 48 + k % 4;
    const u16w v = (u16w)load_bytes(record + byte * KT_PANEL);
    u16w even = v & 0x00FF, odd = v >> 8;
    even = even * powers[digit] & 0x00FF, odd = odd * powers[digit] & 0x00FF;
    even += even << 1, odd += odd << 1;
    return (u8w)(even >> 8 | (odd & 0xFF00));
}

/* Two codes of each column, in the nibbles of bytes. */
INLINE u8w digits_of(const uint8_t *record, const size_t k, const size_t upper) {
    return digit_of(record, k) | (u8w)((u16w)digit_of(record, upper) << 4);
}

ONCE void expand_digits(const kt_grid *g, const uint8_t *record, const size_t first, const size_t count, uint8_t *restrict to) {
    expand_supers(g, record, to);
    for (size_t block = first; block < first + count; block++) {
        fetch_next(g, record, block);
#pragma GCC unroll 1
        for (size_t octet = 0; octet < OCTETS; octet++)
            for (int w = 0; w < WIDTHS; w++) {
                const uint8_t *from = record + w * WIDE_BYTES;
                const size_t k = block * KT_BLOCK + octet * 8;
                const u8w low0 = spread(digits_of(from, k, k + 2)), low1 = spread(digits_of(from, k + 4, k + 6));
                const u8w high0 = spread(digits_of(from, k + 1, k + 3)), high1 = spread(digits_of(from, k + 5, k + 7));
                for (int upper = 0; upper < 2; upper++)
                    store_octet(words_of(low0, low1, upper), words_of(high0, high1, upper), w * WIDE_BYTES + upper * WORDS,
                                to + KT_PANEL * 2 + block * BLOCK_BYTES + octet * OCTET_BYTES);
            }
    }
}

#endif
