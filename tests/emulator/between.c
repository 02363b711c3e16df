/* What kernels put between the emulated instructions: loads, stores, broadcasts, shifts, table lookups, a sum and a
 * multiplication.
 *
 * Compilers spread them so that few emulated instructions follow each other directly, and each would cost a trap of its own.
 * This table holds the most frequent ones in their plainest form: of 512 bits without a mask, and, for the kernels with AVX-VNNI,
 * VEX of 256 bits. They are emulated when they follow an emulated one; everything else returns to the CPU. Nothing depends on it
 * but speed. Semantics: the same instruction. */
#include "emulator.h"

#include <immintrin.h>
#include <string.h>

static int full_vector(const struct kt_insn *insn) { return insn->vector_bytes; }

static int one_dword(const struct kt_insn *insn) {
    (void)insn;
    return 4;
}

static bool plain(const struct kt_insn *insn) {
    return insn->vector_bytes == 64 && !insn->mask && !insn->zeroing && !insn->broadcast;
}

static bool plain_unary(const struct kt_insn *insn) { return plain(insn) && !insn->vvvv; }

static bool plain_unary_w0(const struct kt_insn *insn) { return plain_unary(insn) && !insn->w; }

static bool plain_store(const struct kt_insn *insn) { return plain_unary(insn) && insn->is_memory; }

static bool plain_w0(const struct kt_insn *insn) { return plain(insn) && !insn->w; }

static bool plain_w1(const struct kt_insn *insn) { return plain(insn) && insn->w; }

static bool plain_shift_right(const struct kt_insn *insn) {
    return plain(insn) && insn->modrm_reg == 2; /* the opcode is a group of shifts */
}

static bool plain_shift_right_w0(const struct kt_insn *insn) { return plain_shift_right(insn) && !insn->w; }

static bool ymm(const struct kt_insn *insn) { return insn->vector_bytes == 32; }

static bool ymm_unary(const struct kt_insn *insn) { return ymm(insn) && !insn->vvvv; }

static bool ymm_unary_w0(const struct kt_insn *insn) { return ymm_unary(insn) && !insn->w; }

static bool ymm_shift_right(const struct kt_insn *insn) {
    return ymm(insn) && !insn->is_memory && insn->modrm_reg == 2; /* as above; AVX2 has no memory operand there */
}

static void move(const struct kt_insn *insn, struct kt_frame *frame) {
    uint32_t value[16];
    kt_rm_read(insn, frame, ~0ull, value);
    kt_zmm_write(frame, insn->reg, value, insn->vector_bytes);
}

static void check_alignment(const struct kt_insn *insn, const struct kt_frame *frame) {
    if (insn->is_memory && kt_address(insn, frame) % (uintptr_t)insn->vector_bytes)
        __builtin_trap(); /* #GP on a CPU; the process dies here as there */
}

static void move_aligned(const struct kt_insn *insn, struct kt_frame *frame) {
    check_alignment(insn, frame);
    move(insn, frame);
}

static void store(const struct kt_insn *insn, struct kt_frame *frame) {
    uint8_t value[KT_ZMM_BYTES];
    kt_zmm_read(frame, insn->reg, value);
    if (insn->is_memory)
        memcpy((void *)kt_address(insn, frame), value, (size_t)insn->vector_bytes);
    else /* VEX: assemblers move between registers by whichever opcode is shorter */
        kt_zmm_write(frame, insn->rm, value, insn->vector_bytes);
}

static void store_aligned(const struct kt_insn *insn, struct kt_frame *frame) {
    check_alignment(insn, frame);
    store(insn, frame);
}

static void vpbroadcastd(const struct kt_insn *insn, struct kt_frame *frame) {
    uint32_t value[16];
    kt_rm_read(insn, frame, 1, value);
    for (int i = 1; i < 16; i++) value[i] = value[0];
    kt_zmm_write(frame, insn->reg, value, insn->vector_bytes);
}

__attribute__((target("avx512bw"))) static void vpsrlw(const struct kt_insn *insn, struct kt_frame *frame) {
    uint32_t value[16];
    kt_rm_read(insn, frame, ~0ull, value);
    _mm512_storeu_si512(value, _mm512_srl_epi16(_mm512_loadu_si512(value), _mm_cvtsi32_si128((uint8_t)insn->immediate)));
    kt_zmm_write(frame, insn->vvvv, value, insn->vector_bytes); /* ModRM.reg being taken, vvvv is the destination */
}

__attribute__((target("avx512f"))) static void vpsrld(const struct kt_insn *insn, struct kt_frame *frame) {
    uint32_t value[16];
    kt_rm_read(insn, frame, ~0ull, value);
    _mm512_storeu_si512(value, _mm512_srl_epi32(_mm512_loadu_si512(value), _mm_cvtsi32_si128((uint8_t)insn->immediate)));
    kt_zmm_write(frame, insn->vvvv, value, insn->vector_bytes);
}

__attribute__((target("avx512f"))) static void vpermps(const struct kt_insn *insn, struct kt_frame *frame) {
    uint32_t index[16], table[16];
    kt_zmm_read(frame, insn->vvvv, index);
    kt_rm_read(insn, frame, ~0ull, table);
    _mm512_storeu_si512(table, _mm512_permutexvar_epi32(_mm512_loadu_si512(index), _mm512_loadu_si512(table)));
    kt_zmm_write(frame, insn->reg, table, sizeof table);
}

/* Under the caller's MXCSR, whose exception flags it does not set. Inline assembly, as in avx512_bf16.c. */
__attribute__((target("avx512f"))) static void vmulps(const struct kt_insn *insn, struct kt_frame *frame) {
    uint32_t a[16], b[16], emulation, caller = kt_mxcsr_read(frame);
    kt_zmm_read(frame, insn->vvvv, a);
    kt_rm_read(insn, frame, ~0ull, b);
    __m512 product = _mm512_loadu_ps(a);
    __asm__ volatile("stmxcsr %1; ldmxcsr %2; vmulps %3, %0, %0; ldmxcsr %1"
                     : "+v"(product), "=&m"(emulation)
                     : "m"(caller), "v"(_mm512_loadu_ps(b)));
    _mm512_storeu_ps(a, product);
    kt_zmm_write(frame, insn->reg, a, sizeof a);
}

__attribute__((target("avx512bw"))) static void vpermw(const struct kt_insn *insn, struct kt_frame *frame) {
    uint32_t index[16], table[16];
    kt_zmm_read(frame, insn->vvvv, index);
    kt_rm_read(insn, frame, ~0ull, table);
    _mm512_storeu_si512(table, _mm512_permutexvar_epi16(_mm512_loadu_si512(index), _mm512_loadu_si512(table)));
    kt_zmm_write(frame, insn->reg, table, sizeof table);
}

__attribute__((target("avx512bw"))) static void vpsubusw(const struct kt_insn *insn, struct kt_frame *frame) {
    uint32_t a[16], b[16];
    kt_zmm_read(frame, insn->vvvv, a);
    kt_rm_read(insn, frame, ~0ull, b);
    _mm512_storeu_si512(a, _mm512_subs_epu16(_mm512_loadu_si512(a), _mm512_loadu_si512(b)));
    kt_zmm_write(frame, insn->reg, a, sizeof a);
}

static void vpand(const struct kt_insn *insn, struct kt_frame *frame) {
    uint32_t a[16], b[16];
    kt_zmm_read(frame, insn->vvvv, a);
    kt_rm_read(insn, frame, ~0ull, b);
    for (int i = 0; i < 16; i++) a[i] &= b[i];
    kt_zmm_write(frame, insn->reg, a, insn->vector_bytes);
}

static void vpaddd(const struct kt_insn *insn, struct kt_frame *frame) {
    uint32_t a[16], b[16];
    kt_zmm_read(frame, insn->vvvv, a);
    kt_rm_read(insn, frame, ~0ull, b);
    for (int i = 0; i < 16; i++) a[i] += b[i];
    kt_zmm_write(frame, insn->reg, a, insn->vector_bytes);
}

__attribute__((target("avx512bw"))) static void vpshufb(const struct kt_insn *insn, struct kt_frame *frame) {
    uint32_t table[16], index[16];
    kt_zmm_read(frame, insn->vvvv, table);
    kt_rm_read(insn, frame, ~0ull, index);
    _mm512_storeu_si512(table, _mm512_shuffle_epi8(_mm512_loadu_si512(table), _mm512_loadu_si512(index)));
    kt_zmm_write(frame, insn->reg, table, insn->vector_bytes);
}

#define NATIVE(name_, encoding_, map_, prefix_, opcode_, immediate_bytes_, accepts_, disp8_, execute_) \
    {.name = name_,                                                                                    \
     .encoding = encoding_,                                                                            \
     .map = map_,                                                                                      \
     .prefix = prefix_,                                                                                \
     .opcode = opcode_,                                                                                \
     .immediate_bytes = immediate_bytes_,                                                              \
     .native = true,                                                                                   \
     .accepts = accepts_,                                                                              \
     .disp8_bytes = disp8_,                                                                            \
     .execute = execute_}

/* 6F and 7F, unmasked: the element's width, which prefix and W tell, does not matter. */
static struct kt_opcode opcodes[] = {
    NATIVE("vmovaps", KT_EVEX, 1, 0, 0x28, 0, plain_unary_w0, full_vector, move_aligned),
    NATIVE("vmovdqa", KT_EVEX, 1, 1, 0x6F, 0, plain_unary, full_vector, move_aligned),
    NATIVE("vmovdqu32/64", KT_EVEX, 1, 2, 0x6F, 0, plain_unary, full_vector, move),
    NATIVE("vmovdqu8/16", KT_EVEX, 1, 3, 0x6F, 0, plain_unary, full_vector, move),
    NATIVE("vmovdqa store", KT_EVEX, 1, 1, 0x7F, 0, plain_store, full_vector, store_aligned),
    NATIVE("vmovdqu32/64 store", KT_EVEX, 1, 2, 0x7F, 0, plain_store, full_vector, store),
    NATIVE("vmovdqu8/16 store", KT_EVEX, 1, 3, 0x7F, 0, plain_store, full_vector, store),
    NATIVE("vpbroadcastd", KT_EVEX, 2, 1, 0x58, 0, plain_unary_w0, one_dword, vpbroadcastd),
    NATIVE("vpsrlw", KT_EVEX, 1, 1, 0x71, 1, plain_shift_right, full_vector, vpsrlw),
    NATIVE("vpsrld", KT_EVEX, 1, 1, 0x72, 1, plain_shift_right_w0, full_vector, vpsrld),
    NATIVE("vpermps", KT_EVEX, 2, 1, 0x16, 0, plain_w0, full_vector, vpermps),
    NATIVE("vmulps", KT_EVEX, 1, 0, 0x59, 0, plain_w0, full_vector, vmulps),
    NATIVE("vpermw", KT_EVEX, 2, 1, 0x8D, 0, plain_w1, full_vector, vpermw),
    NATIVE("vpsubusw", KT_EVEX, 1, 1, 0xD9, 0, plain, full_vector, vpsubusw),
    NATIVE("vmovdqa, VEX", KT_VEX, 1, 1, 0x6F, 0, ymm_unary, NULL, move_aligned),
    NATIVE("vmovdqu, VEX", KT_VEX, 1, 2, 0x6F, 0, ymm_unary, NULL, move),
    NATIVE("vmovdqa store, VEX", KT_VEX, 1, 1, 0x7F, 0, ymm_unary, NULL, store_aligned),
    NATIVE("vmovdqu store, VEX", KT_VEX, 1, 2, 0x7F, 0, ymm_unary, NULL, store),
    NATIVE("vbroadcastss, VEX", KT_VEX, 2, 1, 0x18, 0, ymm_unary_w0, NULL, vpbroadcastd),
    NATIVE("vpsrlw, VEX", KT_VEX, 1, 1, 0x71, 1, ymm_shift_right, NULL, vpsrlw),
    NATIVE("vpsrld, VEX", KT_VEX, 1, 1, 0x72, 1, ymm_shift_right, NULL, vpsrld),
    NATIVE("vpand, VEX", KT_VEX, 1, 1, 0xDB, 0, ymm, NULL, vpand),
    NATIVE("vpaddd, VEX", KT_VEX, 1, 1, 0xFE, 0, ymm, NULL, vpaddd),
    NATIVE("vpshufb, VEX", KT_VEX, 2, 1, 0x00, 0, ymm, NULL, vpshufb),
};

struct kt_group kt_between = {opcodes, sizeof opcodes / sizeof *opcodes};
