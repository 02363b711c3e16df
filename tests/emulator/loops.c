/* What closes a loop: ADD and SUB of a small number, CMP, JE and JNE. As in between.c, nothing depends on it but speed: a loop of
 * emulated instructions takes one trap, not one for each time around. */
#include "emulator.h"

static bool is_register(const struct kt_insn *insn) { return insn->w && !insn->is_memory; }

static bool accepts_add(const struct kt_insn *insn) { return is_register(insn) && insn->modrm_reg == 0; }

static bool accepts_sub(const struct kt_insn *insn) { return is_register(insn) && insn->modrm_reg == 5; }

static bool accepts_jump(const struct kt_insn *insn) { return !insn->w; }

enum { CF = 1 << 0, PF = 1 << 2, AF = 1 << 4, ZF = 1 << 6, SF = 1 << 7, OF = 1 << 11 };

/* carries: of a sum, out of each bit; of a difference, the borrows. */
static void set_flags(struct kt_frame *frame, uint64_t result, uint64_t carries) {
    greg_t flags = frame->general[REG_EFL] & ~(greg_t)(CF | PF | AF | ZF | SF | OF);
    if (carries >> 63) flags |= CF;
    if (!__builtin_parityll(result & 0xFF)) flags |= PF;
    if (carries >> 3 & 1) flags |= AF;
    if (!result) flags |= ZF;
    if (result >> 63) flags |= SF;
    if ((carries >> 63 ^ carries >> 62) & 1) flags |= OF;
    frame->general[REG_EFL] = flags;
}

static uint64_t difference(struct kt_frame *frame, uint64_t a, uint64_t b) {
    const uint64_t result = a - b;
    set_flags(frame, result, (~a & b) | (~(a ^ b) & result));
    return result;
}

static void add(const struct kt_insn *insn, struct kt_frame *frame) {
    const uint64_t a = kt_general(frame, insn->rm), b = (uint64_t)(int64_t)insn->immediate, sum = a + b;
    set_flags(frame, sum, (a & b) | ((a | b) & ~sum));
    kt_general_write(frame, insn->rm, sum);
}

static void sub(const struct kt_insn *insn, struct kt_frame *frame) {
    kt_general_write(frame, insn->rm, difference(frame, kt_general(frame, insn->rm), (uint64_t)(int64_t)insn->immediate));
}

static void cmp(const struct kt_insn *insn, struct kt_frame *frame) {
    difference(frame, kt_general(frame, insn->rm), kt_general(frame, insn->reg));
}

/* RIP moves on to the next instruction afterwards, which the distance counts from. */
static void je(const struct kt_insn *insn, struct kt_frame *frame) {
    if (frame->general[REG_EFL] & ZF) frame->general[REG_RIP] += insn->immediate;
}

static void jne(const struct kt_insn *insn, struct kt_frame *frame) {
    if (!(frame->general[REG_EFL] & ZF)) frame->general[REG_RIP] += insn->immediate;
}

#define NATIVE(name_, map_, opcode_, no_modrm_, immediate_bytes_, accepts_, execute_) \
    {.name = name_,                                                                   \
     .encoding = KT_LEGACY,                                                           \
     .map = map_,                                                                     \
     .opcode = opcode_,                                                               \
     .no_modrm = no_modrm_,                                                           \
     .immediate_bytes = immediate_bytes_,                                             \
     .native = true,                                                                  \
     .accepts = accepts_,                                                             \
     .execute = execute_}

static struct kt_opcode opcodes[] = {
    NATIVE("add", 0, 0x83, false, 1, accepts_add, add),       NATIVE("sub", 0, 0x83, false, 1, accepts_sub, sub),
    NATIVE("cmp", 0, 0x39, false, 0, is_register, cmp),       NATIVE("je", 0, 0x74, true, 1, accepts_jump, je),
    NATIVE("jne", 0, 0x75, true, 1, accepts_jump, jne),       NATIVE("je, near", 1, 0x84, true, 4, accepts_jump, je),
    NATIVE("jne, near", 1, 0x85, true, 4, accepts_jump, jne),
};

struct kt_group kt_loops = {opcodes, sizeof opcodes / sizeof *opcodes};
