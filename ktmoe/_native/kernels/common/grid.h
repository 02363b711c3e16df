/* Records of a grid (kt_grid) as q4's blocks: what EXPANDS of panel.h takes.
 *
 * DEFINITION  code k of a record = the magnitude that its entry has, and the sign that stands apart in bit 3; scale = 2 s + 1
 * LAYOUT      columns.h's; with super-scales, and scales that are integers of 8 bits. The two words of 8 k have
 *                 of an entry of 8    its bits, moved down by 2 in the second
 *                 of entries of 4     the lower bytes of both, then the upper ones
 */
#include "kernels/common/columns.h"
#include "kernels/common/ternary.h"

enum { EXPANDED_BYTES = KT_PANEL * 2 + RECORD_BLOCKS * (2 * KT_PANEL + BLOCK_BYTES) }; /* at most, of a record */

/* Bytes of a table of 16, by bytes below 16. */
#if WIDE_BYTES == 64
#define SIXTEEN(...) _mm512_broadcast_i32x4(_mm_setr_epi8(__VA_ARGS__))
#define BYTE_OF_SIXTEEN(table, at) _mm512_shuffle_epi8(table, (__m512i)(at))
#elif WIDE_BYTES == 32
#define SIXTEEN(...) _mm256_broadcastsi128_si256(_mm_setr_epi8(__VA_ARGS__))
#define BYTE_OF_SIXTEEN(table, at) _mm256_shuffle_epi8(table, (__m256i)(at))
#endif

/* Four signs in each of the words' bytes, below 16, as they stand in codes: of k0 and k2 at bits 3 and 7, or of k1 and k3. */
INLINE u16w signs_of(const u16w nibbles, const int odd) {
#ifdef SIXTEEN
    enum { A = 0x08, B = (char)0x80, C = (char)0x88 };
    if (odd) return (u16w)BYTE_OF_SIXTEEN(SIXTEEN(0, 0, A, A, 0, 0, A, A, B, B, C, C, B, B, C, C), nibbles);
    return (u16w)BYTE_OF_SIXTEEN(SIXTEEN(0, A, 0, A, B, C, B, C, 0, A, 0, A, B, C, B, C), nibbles);
#else
    return odd ? (nibbles & 0x0202) << 2 | (nibbles & 0x0808) << 4 : (nibbles & 0x0101) << 3 | (nibbles & 0x0404) << 5;
#endif
}

/* Bit 3 is the parity of bytes below 16. */
INLINE u8w parity_of(const u8w nibbles) {
#ifdef SIXTEEN
    return (u8w)BYTE_OF_SIXTEEN(SIXTEEN(0, 8, 8, 0, 8, 0, 0, 8, 8, 0, 0, 8, 0, 8, 8, 0), nibbles);
#else
    const u8w twos = nibbles ^ nibbles << 2;
    return (twos ^ twos << 1) & 8;
#endif
}

/* The signs of eight weights, four in each. */
typedef struct signs {
    u8w low, high;
} signs;

INLINE signs all_signs(const u8w stored, const int sign_bits) {
    if (sign_bits == 1) return (signs){-stored & 15, -stored & 15};
    signs s = {stored & 15, (u8w)((u16w)stored >> 4) & 15};
    if (sign_bits == 7) s.high |= parity_of(s.low) ^ parity_of(s.high);
    return s;
}

#if WIDE_BYTES == 64
/* Entries of a table of 64 * `tables` by VPERMI2W, which looks at the lower six bits of an index, for words [0, count). Of indices with
 * the bit `added`, if that is not 0; what others have stays. */
INLINE void permute(const uint16_t *entries, const int tables, const uint16_t *index, const int count, const int added,
                    uint16_t *to) {
    __m512i table[16];
    for (int i = 0; i < 2 * tables; i++) table[i] = _mm512_loadu_si512(entries + i * WORDS);
    for (int i = 0; i < count; i += WORDS) {
        const __m512i at = _mm512_loadu_si512(index + i);
        __m512i of[8];
        for (int t = 0; t < tables; t++) of[t] = _mm512_permutex2var_epi16(table[2 * t], at, table[2 * t + 1]);
        for (int bit = 64, left = tables / 2; left; bit *= 2, left /= 2) {
            const __mmask32 set = _mm512_test_epi16_mask(at, _mm512_set1_epi16((short)bit));
            for (int t = 0; t < left; t++) of[t] = _mm512_mask_blend_epi16(set, of[2 * t], of[2 * t + 1]);
        }
        if (added) {
            const __mmask32 set = _mm512_test_epi16_mask(at, _mm512_set1_epi16((short)added));
            of[0] = _mm512_mask_blend_epi16(set, _mm512_loadu_si512(to + i), of[0]);
        }
        _mm512_storeu_si512(to + i, of[0]);
    }
}
#endif

/* The entries of so many indices. */
INLINE void look_up(const kt_grid *g, const uint16_t *restrict index, const int count, uint16_t *restrict to) {
    const uint16_t *entries = g->entries;
#if WIDE_BYTES == 64
    if (g->count == 256) {
        permute(entries, 4, index, count, 0, to);
        return;
    }
    if (g->count <= 1024) {
        permute(entries, 8, index, count, 0, to);
        if (g->count == 1024) permute(entries + 512, 8, index, count, 512, to);
        return;
    }
#endif
#if WIDE_BYTES > 16
    /* Eight are put together in a register: words that are stored one by one would have to leave the store buffer before a vector of
     * them is loaded. Beyond 1024 entries this is faster than VPERMI2W, too. */
    for (int i = 0; i < count; i += 8) {
        __m128i of = _mm_cvtsi32_si128(entries[index[i]]);
#define INSERT(n) of = _mm_insert_epi16(of, entries[index[i + n]], n)
        INSERT(1), INSERT(2), INSERT(3), INSERT(4), INSERT(5), INSERT(6), INSERT(7);
#undef INSERT
        _mm_storeu_si128((__m128i *)(to + i), of);
    }
#else
    for (int i = 0; i < count; i++) to[i] = entries[index[i]];
#endif
}

/* The codes of 8 k: from words of the entries, in the order that words_of() gives, and signs, spread. */
INLINE void store_codes(const uint16_t (*entries)[KT_PANEL], const int weights, const signs s, const int w, uint8_t *to) {
    for (int upper = 0; upper < 2; upper++) {
        const int column = w * WIDE_BYTES + upper * WORDS;
        const u16w nibbles = words_of(s.low, s.high, upper);
        u16w first, second, low, high;
        memcpy(&first, entries[0] + column, sizeof first);
        if (weights == 8) {
            low = first & 0x3333, high = first >> 2 & 0x3333;
        } else {
            memcpy(&second, entries[1] + column, sizeof second);
            low = (first & 0x00FF) | second << 8, high = first >> 8 | (second & 0xFF00);
        }
        low |= signs_of(nibbles, 0), high |= signs_of(nibbles, 1);
        store_octet(low, high, column, to);
    }
}

/* 32 k of a record: scales in a header, codes behind it. */
INLINE void expand_block(const kt_grid *g, const uint8_t *record, const int block, uint8_t *restrict to, const int weights,
                         const scaling how) {
    const int items = KT_BLOCK / weights;
    uint16_t indices[2 * OCTETS][KT_PANEL], entries[2 * OCTETS][KT_PANEL];
    for (int half = 0; half < halves(how); half++, to += KT_PANEL)
        for (int w = 0; w < WIDTHS; w++) {
            const u8w s = byte_of(record + w * WIDE_BYTES, &g->scale[block * halves(how) + half]);
            store_bytes(to + w * WIDE_BYTES, s + s + 1);
        }
    for (int i = 0; i < items; i++)
        for (int w = 0; w < WIDTHS; w++) {
            const u8w low = spread(byte_of(record + w * WIDE_BYTES, &g->index[0][block * items + i])), zero = {0};
            u8w high = zero;
            if (g->count > 256) high = spread(byte_of(record + w * WIDE_BYTES, &g->index[1][block * items + i]));
            for (int upper = 0; upper < 2; upper++) {
                const u16w index = words_of(low, high, upper);
                memcpy(indices[i] + w * WIDE_BYTES + upper * WORDS, &index, sizeof index);
            }
        }
    look_up(g, indices[0], items * KT_PANEL, entries[0]);
    for (int octet = 0; octet < OCTETS; octet++)
        for (int w = 0; w < WIDTHS; w++) {
            const u8w stored = spread(byte_of(record + w * WIDE_BYTES, &g->sign[block * OCTETS + octet]));
            const signs s = all_signs(stored, g->sign_bits);
            store_codes((const uint16_t (*)[KT_PANEL])entries + octet * items / OCTETS, weights, s, w,
                        to + octet * OCTET_BYTES);
        }
}

/* Blocks [first, first + count) of a record, and its super-scales: each where it would stand in a packed panel of one record. What
 * comes a record further is fetched meanwhile. */
INLINE void expand_record(const kt_codebook *book, const uint8_t *record, const size_t first, const size_t count,
                          uint8_t *restrict to, const scaling how) {
    const kt_grid *g = book->grid;
    expand_supers(g, record, to);
    for (size_t block = first; block < first + count; block++) {
        uint8_t *at = to + super_bytes(how) + block * (header_bytes(how) + BLOCK_BYTES);
        fetch_next(g, record, block);
        if (g->weights == 8)
            expand_block(g, record, (int)block, at, 8, how);
        else
            expand_block(g, record, (int)block, at, 4, how);
    }
}

/* Compiled once for each way. */
ONCE void expand_blocks(const kt_codebook *book, const uint8_t *record, size_t first, size_t count, uint8_t *to) {
    expand_record(book, record, first, count, to, INT8 | SUPER);
}
ONCE void expand_halves(const kt_codebook *book, const uint8_t *record, size_t first, size_t count, uint8_t *to) {
    expand_record(book, record, first, count, to, INT8 | SUPER | HALVES);
}

/* Blocks of a panel of records, from block `number` on, within a record, as they would stand in a packed panel of one record. */
INLINE void expand(const kt_codebook *book, const uint8_t *panel, const size_t number, const size_t count, uint8_t *to,
                   const scaling how) {
    const uint8_t *record = panel + number / RECORD_BLOCKS * book->grid->record_bytes * KT_PANEL;
    if (kind_of(how) == SUPER_ALONE)
        expand_digits(book->grid, record, number % RECORD_BLOCKS, count, to);
    else
        (how & HALVES ? expand_halves : expand_blocks)(book, record, number % RECORD_BLOCKS, count, to);
}
