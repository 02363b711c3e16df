/* AVX512_BF16: VDPBF16PS, VCVTNE2PS2BF16, VCVTNEPS2BF16, after the operation sections of Intel's Software Developer's Manual.
 *
 *   VDPBF16PS dest, a, b         dest[i] = fma(a[2i+1], b[2i+1], dest[i]); dest[i] = fma(a[2i], b[2i], dest[i])
 *   VCVTNE2PS2BF16 dest, a, b    dest = bf16(b) in the lower half, bf16(a) in the upper
 *   VCVTNEPS2BF16 dest, a        dest = bf16(a), half as long as a
 *
 * All round to nearest even, take denormal inputs as zeros, flush denormal results to zeros, and neither read nor write
 * MXCSR. The handler runs with RNE, DAZ and FTZ set (trap.c), and then the native FMA is the manual's step to the bit: one
 * rounding, and operands a, b, accumulator in falling priority when several are NaN. */
#include "emulator.h"

#include <immintrin.h>
#include <string.h>

static int full_tuple(const struct kt_insn *insn) { return insn->broadcast ? 4 : insn->vector_bytes; }

static bool accepts_two_operands(const struct kt_insn *insn) {
    return !insn->w && insn->vector_bytes && !(insn->zeroing && !insn->mask) && !(insn->broadcast && !insn->is_memory);
}

static bool accepts_one_operand(const struct kt_insn *insn) { return accepts_two_operands(insn) && !insn->vvvv; }

static uint64_t write_mask(const struct kt_insn *insn, const struct kt_frame *frame) {
    return insn->mask ? kt_mask_read(frame, insn->mask) : ~0ull;
}

/* Inline assembly, as a compiler may swap the factors, which decides between two NaNs, and may move the multiplication
 * before the change of MXCSR. */
__attribute__((target("avx512f"))) static __m512 fma_in_order(__m512 a, __m512 b, __m512 c) {
    __asm__ volatile("vfmadd231ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
    return c;
}

__attribute__((target("avx512f"))) static void dot_pairs(uint32_t *acc, const uint32_t *a, const uint32_t *b) {
    const __m512i odd = _mm512_set1_epi32((int)0xFFFF0000u);
    const __m512i a_pairs = _mm512_loadu_si512(a), b_pairs = _mm512_loadu_si512(b);
    __m512 acc_f32x16 = _mm512_loadu_ps(acc);
    acc_f32x16 = fma_in_order(_mm512_castsi512_ps(_mm512_and_si512(a_pairs, odd)),
                              _mm512_castsi512_ps(_mm512_and_si512(b_pairs, odd)), acc_f32x16);
    acc_f32x16 = fma_in_order(_mm512_castsi512_ps(_mm512_slli_epi32(a_pairs, 16)),
                              _mm512_castsi512_ps(_mm512_slli_epi32(b_pairs, 16)), acc_f32x16);
    _mm512_storeu_ps(acc, acc_f32x16);
}

static void vdpbf16ps(const struct kt_insn *insn, struct kt_frame *frame) {
    const uint64_t mask = write_mask(insn, frame);
    uint32_t a[16], b[16], acc[16], dest[16];
    kt_zmm_read(frame, insn->reg, dest);
    kt_zmm_read(frame, insn->vvvv, a);
    kt_rm_read(insn, frame, mask, b);
    memcpy(acc, dest, sizeof acc);
    dot_pairs(acc, a, b);
    for (int i = 0; i < insn->vector_bytes / 4; i++) dest[i] = mask >> i & 1 ? acc[i] : insn->zeroing ? 0 : dest[i];
    kt_zmm_write(frame, insn->reg, dest, insn->vector_bytes);
}

/* The manual's convert_fp32_to_bfloat16. */
static uint16_t to_bf16(uint32_t x) {
    const uint32_t exponent = x & 0x7F800000, fraction = x & 0x007FFFFF;
    if (!exponent) return x >> 16 & 0x8000;
    if (exponent == 0x7F800000) return x >> 16 | (fraction ? 0x0040 : 0); /* infinity as it is; a NaN cut and made quiet */
    return (x + 0x7FFF + (x >> 16 & 1)) >> 16;
}

static void write_bf16(const struct kt_insn *insn, struct kt_frame *frame, uint64_t mask, const uint32_t *source,
                       int elements) {
    uint16_t dest[32];
    kt_zmm_read(frame, insn->reg, dest);
    for (int i = 0; i < elements; i++) dest[i] = mask >> i & 1 ? to_bf16(source[i]) : insn->zeroing ? 0 : dest[i];
    kt_zmm_write(frame, insn->reg, dest, 2 * elements);
}

static void vcvtne2ps2bf16(const struct kt_insn *insn, struct kt_frame *frame) {
    const int half = insn->vector_bytes / 4;
    uint32_t source[32];
    kt_rm_read(insn, frame, ~0ull, source); /* all of it: this one does not suppress faults of masked-out elements */
    kt_zmm_read(frame, insn->vvvv, source + half);
    write_bf16(insn, frame, write_mask(insn, frame), source, 2 * half);
}

static void vcvtneps2bf16(const struct kt_insn *insn, struct kt_frame *frame) {
    const uint64_t mask = write_mask(insn, frame);
    uint32_t source[16];
    kt_rm_read(insn, frame, mask, source);
    write_bf16(insn, frame, mask, source, insn->vector_bytes / 4);
}

#define EVEX_0F38_W0(name_, prefix_, opcode_, accepts_) \
    {.name = #name_,                                    \
     .encoding = KT_EVEX,                               \
     .map = 2,                                          \
     .prefix = prefix_,                                 \
     .opcode = opcode_,                                 \
     .accepts = accepts_,                               \
     .disp8_bytes = full_tuple,                         \
     .execute = name_}

static struct kt_opcode opcodes[] = {
    EVEX_0F38_W0(vdpbf16ps, 2, 0x52, accepts_two_operands),
    EVEX_0F38_W0(vcvtne2ps2bf16, 3, 0x72, accepts_two_operands),
    EVEX_0F38_W0(vcvtneps2bf16, 2, 0x72, accepts_one_operand),
};

struct kt_group kt_avx512_bf16 = {opcodes, sizeof opcodes / sizeof *opcodes};
