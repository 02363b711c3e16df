/* AMX-BF16 and AMX-INT8: C += A * B on tiles, after the operation sections of Intel's Software Developer's Manual.
 *
 *   TDPBF16PS C, A, B     for each element of C, over the pairs k of a row of A and a column of B:
 *                         even = fma(A[2k], B[2k], even); odd = fma(A[2k+1], B[2k+1], odd); then C = C + (even + odd)
 *   TDPBSSD ...           C += the sum of four products of bytes for each k; S and U: A's and B's bytes signed or unsigned
 *
 * A row of B holds one k: the pair, or the four bytes, of each column. The first rounds to nearest even, takes denormal inputs
 * as zeros and flushes denormal results; the handler runs with MXCSR set so (trap.c). The others are exact and wrap around. */
#include "emulator.h"

#include <immintrin.h>

#define AVX512 __attribute__((target("avx512f,avx512bw")))
enum { ROWS = 8 }; /* of C at a time, as many chains of FMAs as hide their latency */

static bool accepts(const struct kt_insn *insn) {
    return !insn->w && insn->vector_bytes == 16 && !insn->is_memory && insn->reg < KT_TILES && insn->rm < KT_TILES &&
           insn->vvvv < KT_TILES;
}

struct operands {
    struct kt_tile *c;
    const struct kt_tile *a, *b;
    int rows, columns, k; /* C's; k = dwords in a row of A */
};

static bool is_configured(const struct kt_insn *insn, const struct kt_frame *frame, int tile) {
    const struct kt_tile_config *config = &frame->tiles->config;
    if (!config->rows[tile]) return kt_error(insn, frame, "tmm%d is not configured", tile, 0, 0);
    if (config->row_bytes[tile] % 4)
        return kt_error(insn, frame, "tmm%d has rows of %d bytes, not a multiple of 4", tile, config->row_bytes[tile], 0);
    return true;
}

/* Checks the shapes; false if they are wrong. */
static bool find_operands(const struct kt_insn *insn, struct kt_frame *frame, struct operands *operands) {
    const int c = insn->reg, a = insn->rm, b = insn->vvvv;
    struct kt_tile_config *config = &frame->tiles->config;
    if (!config->palette) return kt_error(insn, frame, "no tiles are configured", 0, 0, 0);
    if (c == a || c == b || a == b) return kt_error(insn, frame, "tmm%d is two operands", c == a ? c : b, 0, 0);
    if (!is_configured(insn, frame, c) || !is_configured(insn, frame, a) || !is_configured(insn, frame, b)) return false;
    if (config->rows[c] != config->rows[a])
        return kt_error(insn, frame, "C has %d rows, but A %d", config->rows[c], config->rows[a], 0);
    if (config->row_bytes[c] != config->row_bytes[b])
        return kt_error(insn, frame, "C has rows of %d bytes, but B of %d", config->row_bytes[c], config->row_bytes[b], 0);
    if (config->row_bytes[a] / 4 != config->rows[b])
        return kt_error(insn, frame, "A has rows of %d bytes, but B %d rows", config->row_bytes[a], config->rows[b], 0);
    config->start_row = 0;
    *operands = (struct operands){.c = &frame->tiles->tile[c],
                                  .a = &frame->tiles->tile[a],
                                  .b = &frame->tiles->tile[b],
                                  .rows = config->rows[c],
                                  .columns = config->row_bytes[c] / 4,
                                  .k = config->rows[b]};
    return true;
}

/* Inline assembly, as a compiler may swap operands, which decides between two NaNs, and may move an instruction before the
 * change of MXCSR. */
AVX512 static inline __m512 fma_in_order(__m512 a, __m512 b, __m512 c) {
    __asm__ volatile("vfmadd231ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
    return c;
}

AVX512 static inline __m512 add_in_order(__m512 a, __m512 b) {
    __m512 sum;
    __asm__ volatile("vaddps %2, %1, %0" : "=v"(sum) : "v"(a), "v"(b));
    return sum;
}

/* A tile's elements as 32 bits each, even and odd ones apart. */
struct halves {
    _Alignas(64) uint32_t even[KT_TILE_ROWS][16], odd[KT_TILE_ROWS][16];
};

AVX512 static void split_bf16(const struct kt_tile *tile, int rows, struct halves *f32) {
    for (int r = 0; r < rows; r++) {
        const __m512i pairs = _mm512_load_si512(tile->row[r]);
        _mm512_store_si512(f32->even[r], _mm512_slli_epi32(pairs, 16));
        _mm512_store_si512(f32->odd[r], _mm512_and_si512(pairs, _mm512_set1_epi32((int)0xFFFF0000u)));
    }
}

static int whole_blocks(int rows) { return (rows + ROWS - 1) / ROWS * ROWS; }

AVX512 static void tdpbf16ps(const struct kt_insn *insn, struct kt_frame *frame) {
    struct operands tiles;
    struct halves a, b;
    if (!find_operands(insn, frame, &tiles)) return;
    const __mmask16 columns = (__mmask16)((1u << tiles.columns) - 1);
    split_bf16(tiles.a, whole_blocks(tiles.rows), &a); /* rows beyond A's shape are zero, and their results go nowhere */
    split_bf16(tiles.b, tiles.k, &b);
    for (int first = 0; first < tiles.rows; first += ROWS) {
        __m512 even[ROWS], odd[ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) even[r] = odd[r] = _mm512_setzero_ps();
        for (int k = 0; k < tiles.k; k++) {
            const __m512 b_even = _mm512_load_ps(b.even[k]), b_odd = _mm512_load_ps(b.odd[k]);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                even[r] = fma_in_order(_mm512_castsi512_ps(_mm512_set1_epi32((int)a.even[first + r][k])), b_even, even[r]);
                odd[r] = fma_in_order(_mm512_castsi512_ps(_mm512_set1_epi32((int)a.odd[first + r][k])), b_odd, odd[r]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            if (first + r >= tiles.rows) continue;
            uint8_t *row = tiles.c->row[first + r];
            const __m512 sum = add_in_order(_mm512_load_ps(row), add_in_order(even[r], odd[r]));
            _mm512_mask_store_ps(row, columns, sum);
        }
    }
}

/* Bytes 0 and 2 of each dword as even, 1 and 3 as odd, 16 bits each. */
AVX512 static void split_int8(const struct kt_tile *tile, int rows, bool is_signed, struct halves *i16) {
    for (int r = 0; r < rows; r++) {
        const __m512i bytes = _mm512_load_si512(tile->row[r]), low = _mm512_slli_epi16(bytes, 8);
        _mm512_store_si512(i16->even[r], is_signed ? _mm512_srai_epi16(low, 8) : _mm512_srli_epi16(low, 8));
        _mm512_store_si512(i16->odd[r], is_signed ? _mm512_srai_epi16(bytes, 8) : _mm512_srli_epi16(bytes, 8));
    }
}

AVX512 static void dot_int8(const struct kt_insn *insn, struct kt_frame *frame, bool a_is_signed, bool b_is_signed) {
    struct operands tiles;
    struct halves a, b;
    if (!find_operands(insn, frame, &tiles)) return;
    split_int8(tiles.a, tiles.rows, a_is_signed, &a);
    split_int8(tiles.b, tiles.k, b_is_signed, &b);
    for (int r = 0; r < tiles.rows; r++) {
        __m512i c = _mm512_load_si512(tiles.c->row[r]); /* columns beyond C's are zero in B, too */
        for (int k = 0; k < tiles.k; k++) {
            const __m512i a_even = _mm512_set1_epi32((int)a.even[r][k]), a_odd = _mm512_set1_epi32((int)a.odd[r][k]);
            c = _mm512_add_epi32(c, _mm512_madd_epi16(a_even, _mm512_load_si512(b.even[k])));
            c = _mm512_add_epi32(c, _mm512_madd_epi16(a_odd, _mm512_load_si512(b.odd[k])));
        }
        _mm512_store_si512(tiles.c->row[r], c);
    }
}

static void tdpbssd(const struct kt_insn *insn, struct kt_frame *frame) { dot_int8(insn, frame, true, true); }
static void tdpbsud(const struct kt_insn *insn, struct kt_frame *frame) { dot_int8(insn, frame, true, false); }
static void tdpbusd(const struct kt_insn *insn, struct kt_frame *frame) { dot_int8(insn, frame, false, true); }
static void tdpbuud(const struct kt_insn *insn, struct kt_frame *frame) { dot_int8(insn, frame, false, false); }

#define VEX_0F38(name_, prefix_, opcode_) \
    {.name = #name_,                      \
     .encoding = KT_VEX,                  \
     .map = 2,                            \
     .prefix = prefix_,                   \
     .opcode = opcode_,                   \
     .tiles = true,                       \
     .accepts = accepts,                  \
     .execute = name_}

static struct kt_opcode opcodes[] = {
    VEX_0F38(tdpbf16ps, 2, 0x5C), VEX_0F38(tdpbssd, 3, 0x5E), VEX_0F38(tdpbsud, 2, 0x5E),
    VEX_0F38(tdpbusd, 1, 0x5E),   VEX_0F38(tdpbuud, 0, 0x5E),
};

struct kt_group kt_amx_dot = {opcodes, sizeof opcodes / sizeof *opcodes};
