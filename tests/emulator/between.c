/* What kernels put between the emulated instructions: loads, stores, broadcasts, shifts, table lookups and a multiplication.
 *
 * Compilers spread them so that few emulated instructions follow each other directly, and each would cost a trap of its own.
 * This table holds the most frequent ones in their plainest form (512 bits, no mask), and they are emulated when they follow
 * an emulated one; everything else returns to the CPU. Nothing depends on it but speed. Semantics: the same instruction. */
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

static void move(const struct kt_insn *insn, struct kt_frame *frame) {
    uint32_t value[16];
    kt_rm_read(insn, frame, ~0ull, value);
    kt_zmm_write(frame, insn->reg, value, sizeof value);
}

static void check_alignment(const struct kt_insn *insn, const struct kt_frame *frame) {
    if (insn->is_memory && kt_address(insn, frame) % KT_ZMM_BYTES)
        __builtin_trap(); /* #GP on a CPU; the process dies here as there */
}

static void move_aligned(const struct kt_insn *insn, struct kt_frame *frame) {
    check_alignment(insn, frame);
    move(insn, frame);
}

static void store(const struct kt_insn *insn, struct kt_frame *frame) {
    uint8_t value[KT_ZMM_BYTES];
    kt_zmm_read(frame, insn->reg, value);
    memcpy((void *)kt_address(insn, frame), value, sizeof value);
}

static void store_aligned(const struct kt_insn *insn, struct kt_frame *frame) {
    check_alignment(insn, frame);
    store(insn, frame);
}

static void vpbroadcastd(const struct kt_insn *insn, struct kt_frame *frame) {
    uint32_t value[16];
    kt_rm_read(insn, frame, 1, value);
    for (int i = 1; i < 16; i++) value[i] = value[0];
    kt_zmm_write(frame, insn->reg, value, sizeof value);
}

__attribute__((target("avx512bw"))) static void vpsrlw(const struct kt_insn *insn, struct kt_frame *frame) {
    uint32_t value[16];
    kt_rm_read(insn, frame, ~0ull, value);
    _mm512_storeu_si512(value, _mm512_srl_epi16(_mm512_loadu_si512(value), _mm_cvtsi32_si128(insn->immediate)));
    kt_zmm_write(frame, insn->vvvv, value, sizeof value); /* ModRM.reg being taken, vvvv is the destination */
}

__attribute__((target("avx512f"))) static void vpsrld(const struct kt_insn *insn, struct kt_frame *frame) {
    uint32_t value[16];
    kt_rm_read(insn, frame, ~0ull, value);
    _mm512_storeu_si512(value, _mm512_srl_epi32(_mm512_loadu_si512(value), _mm_cvtsi32_si128(insn->immediate)));
    kt_zmm_write(frame, insn->vvvv, value, sizeof value);
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

#define NATIVE(name_, map_, prefix_, opcode_, immediate_bytes_, accepts_, disp8_, execute_) \
    {.name = name_,                                                                         \
     .encoding = KT_EVEX,                                                                   \
     .map = map_,                                                                           \
     .prefix = prefix_,                                                                     \
     .opcode = opcode_,                                                                     \
     .immediate_bytes = immediate_bytes_,                                                   \
     .native = true,                                                                        \
     .accepts = accepts_,                                                                   \
     .disp8_bytes = disp8_,                                                                 \
     .execute = execute_}

/* 6F and 7F, unmasked: the element's width, which prefix and W tell, does not matter. */
static struct kt_opcode opcodes[] = {
    NATIVE("vmovaps", 1, 0, 0x28, 0, plain_unary_w0, full_vector, move_aligned),
    NATIVE("vmovdqa", 1, 1, 0x6F, 0, plain_unary, full_vector, move_aligned),
    NATIVE("vmovdqu32/64", 1, 2, 0x6F, 0, plain_unary, full_vector, move),
    NATIVE("vmovdqu8/16", 1, 3, 0x6F, 0, plain_unary, full_vector, move),
    NATIVE("vmovdqa store", 1, 1, 0x7F, 0, plain_store, full_vector, store_aligned),
    NATIVE("vmovdqu32/64 store", 1, 2, 0x7F, 0, plain_store, full_vector, store),
    NATIVE("vmovdqu8/16 store", 1, 3, 0x7F, 0, plain_store, full_vector, store),
    NATIVE("vpbroadcastd", 2, 1, 0x58, 0, plain_unary_w0, one_dword, vpbroadcastd),
    NATIVE("vpsrlw", 1, 1, 0x71, 1, plain_shift_right, full_vector, vpsrlw),
    NATIVE("vpsrld", 1, 1, 0x72, 1, plain_shift_right_w0, full_vector, vpsrld),
    NATIVE("vpermps", 2, 1, 0x16, 0, plain_w0, full_vector, vpermps),
    NATIVE("vmulps", 1, 0, 0x59, 0, plain_w0, full_vector, vmulps),
    NATIVE("vpermw", 2, 1, 0x8D, 0, plain_w1, full_vector, vpermw),
    NATIVE("vpsubusw", 1, 1, 0xD9, 0, plain, full_vector, vpsubusw),
};

struct kt_group kt_avx512_between = {opcodes, sizeof opcodes / sizeof *opcodes};
