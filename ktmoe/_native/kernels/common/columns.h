/* Bytes of a record in the columns of a panel, and how they become q4's blocks. Includers have q4's layout.
 *
 * LAYOUT      pack/layout.h. A line of a record has one byte of 64 columns. What it becomes has q4's layout: its dword of 8 k, nibbles
 *             k0 k2 k4 k6 | k1 k3 k5 k7, is made of two words.
 * REGULARITIES lane = column in all steps. Bytes become words, and these dwords, by interleaving within 128 bits; so the dwords of a
 *             line are put in another order first, and the result comes out in that of columns.
 */
#ifndef KT_COLUMNS_H
#define KT_COLUMNS_H

#include "kernels/common/q4_layout.h"

/* The vectors that bytes of columns are in, of as many bits as shuffles have. */
#if defined __AVX512BW__
#define WIDE_BYTES 64
#elif defined __AVX2__
#define WIDE_BYTES 32
#else
#define WIDE_BYTES 16
#endif

typedef uint8_t u8w __attribute__((vector_size(WIDE_BYTES)));
typedef uint16_t u16w __attribute__((vector_size(WIDE_BYTES)));
typedef uint32_t u32w __attribute__((vector_size(WIDE_BYTES)));

enum {
    WIDTHS = KT_PANEL / WIDE_BYTES, /* vectors of a line */
    WORDS = WIDE_BYTES / 2,         /* columns of a vector of words */
    RECORD_BLOCKS = KT_SUPER_GROUP / KT_BLOCK,
    OCTETS = KT_BLOCK / 8,
};

/* What the compiler's extension does not say: dwords so that steps below end in the order of columns; the first or second bytes, words
 * of each 128 bits, interleaved. */
#if WIDE_BYTES == 64
INLINE u8w spread(const u8w v) {
    const u32w order = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    return (u8w)_mm512_permutexvar_epi32((__m512i)order, (__m512i)v);
}
INLINE u16w words_of(const u8w low, const u8w high, const int upper) {
    return (u16w)(upper ? _mm512_unpackhi_epi8((__m512i)low, (__m512i)high)
                        : _mm512_unpacklo_epi8((__m512i)low, (__m512i)high));
}
INLINE u32w dwords_of(const u16w low, const u16w high, const int upper) {
    return (u32w)(upper ? _mm512_unpackhi_epi16((__m512i)low, (__m512i)high)
                        : _mm512_unpacklo_epi16((__m512i)low, (__m512i)high));
}
#elif WIDE_BYTES == 32
INLINE u8w spread(const u8w v) {
    return (u8w)_mm256_permutevar8x32_epi32((__m256i)v, _mm256_set_epi32(7, 5, 3, 1, 6, 4, 2, 0));
}
INLINE u16w words_of(const u8w low, const u8w high, const int upper) {
    return (u16w)(upper ? _mm256_unpackhi_epi8((__m256i)low, (__m256i)high)
                        : _mm256_unpacklo_epi8((__m256i)low, (__m256i)high));
}
INLINE u32w dwords_of(const u16w low, const u16w high, const int upper) {
    return (u32w)(upper ? _mm256_unpackhi_epi16((__m256i)low, (__m256i)high)
                        : _mm256_unpacklo_epi16((__m256i)low, (__m256i)high));
}
#else
INLINE u8w spread(const u8w v) { return v; }
INLINE u16w words_of(const u8w low, const u8w high, const int upper) {
    u16w words;
    for (int i = 0; i < WORDS; i++) words[i] = (uint16_t)(low[upper * WORDS + i] | high[upper * WORDS + i] << 8);
    return words;
}
INLINE u32w dwords_of(const u16w low, const u16w high, const int upper) {
    u32w dwords;
    for (int i = 0; i < WORDS / 2; i++) dwords[i] = low[upper * WORDS / 2 + i] | (uint32_t)high[upper * WORDS / 2 + i] << 16;
    return dwords;
}
#endif

INLINE u8w load_bytes(const uint8_t *p) {
    u8w v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void store_bytes(uint8_t *p, const u8w v) { memcpy(p, &v, sizeof v); }

/* The bits of a byte of each column, where they belong. Dwords are rotated: what comes from a neighbour has no mask. */
INLINE u8w bits_of(const uint8_t *record, const kt_bits *b) {
    const u32w v = (u32w)load_bytes(record + b->byte * KT_PANEL), mask = (u32w){0} + b->mask;
#if WIDE_BYTES == 64
    return (u8w)((u32w)_mm512_rolv_epi32((__m512i)v, _mm512_set1_epi32((int)b->rotate)) & mask);
#elif WIDE_BYTES == 32
    const __m256i left = _mm256_set1_epi32((int)b->rotate), right = _mm256_sub_epi32(_mm256_set1_epi32(32), left);
    return (u8w)((u32w)_mm256_or_si256(_mm256_sllv_epi32((__m256i)v, left), _mm256_srlv_epi32((__m256i)v, right)) & mask);
#else
    return (u8w)((v << b->rotate | v >> (-b->rotate & 31)) & mask);
#endif
}

/* A byte of each column of a vector. */
INLINE u8w byte_of(const uint8_t *record, const kt_byte *b) {
    if (b->of[0].mask == UINT32_MAX) return load_bytes(record + b->of[0].byte * KT_PANEL);
    const u8w first = bits_of(record, &b->of[0]);
    return b->of[1].mask ? first | bits_of(record, &b->of[1]) : first;
}

/* Words of WORDS columns from `column` on, in the order that words_of() gives, to dwords of 8 k. */
INLINE void store_octet(const u16w low, const u16w high, const int column, uint8_t *to) {
    for (int part = 0; part < 2; part++) {
        const int at = column + part * WORDS / 2;
        const u32w codes = dwords_of(low, high, part);
        memcpy(to + at / 16 * SIXTEEN_BYTES + at % 16 * 4, &codes, sizeof codes);
    }
}

/* A record's super-scales, or its only scales. */
INLINE void expand_supers(const kt_grid *g, const uint8_t *record, uint8_t *to) {
    uint16_t supers[KT_PANEL];
    uint8_t low[KT_PANEL], high[KT_PANEL];
    for (int w = 0; w < WIDTHS; w++) {
        store_bytes(low + w * WIDE_BYTES, byte_of(record + w * WIDE_BYTES, &g->super[0]));
        store_bytes(high + w * WIDE_BYTES, byte_of(record + w * WIDE_BYTES, &g->super[1]));
    }
    for (int c = 0; c < KT_PANEL; c++) supers[c] = (uint16_t)(low[c] | high[c] << 8);
    memcpy(to, supers, sizeof supers);
}

/* Fetches a block's share of what comes a record further. */
INLINE void fetch_next(const kt_grid *g, const uint8_t *record, const size_t block) {
    const size_t record_bytes = g->record_bytes * KT_PANEL;
    const uint8_t *next = record + record_bytes * (RECORD_BLOCKS + block) / RECORD_BLOCKS;
    for (size_t line = 0; line < record_bytes / RECORD_BLOCKS; line += LINE) prefetch_l1(next + line);
}

#endif
