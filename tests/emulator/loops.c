/* What general registers do between the emulated instructions: addresses, counts, jumps, and PREFETCH, which does nothing here.
 * As in between.c, nothing depends on it but speed: a loop of emulated instructions takes one trap, not one for each time around.
 *
 * Nothing here may lower RSP: the handler's own frames lie below it. */
#include "emulator.h"

#include <string.h>

enum { RSP = 4 };
enum { CF = 1 << 0, PF = 1 << 2, AF = 1 << 4, ZF = 1 << 6, SF = 1 << 7, OF = 1 << 11 };

/* Operands and results are of 64 bits with REX.W, else of 32, and then the register's upper half becomes 0. */
static int bits(const struct kt_insn *insn) { return insn->w ? 64 : 32; }

static uint64_t cut(const struct kt_insn *insn, uint64_t value) { return insn->w ? value : (uint32_t)value; }

static uint64_t rm_read(const struct kt_insn *insn, const struct kt_frame *frame) {
    uint64_t value = 0;
    if (!insn->is_memory) return cut(insn, kt_general(frame, insn->rm));
    memcpy(&value, (const void *)kt_address(insn, frame), (size_t)bits(insn) / 8);
    return value;
}

static void rm_write(const struct kt_insn *insn, struct kt_frame *frame, uint64_t value) {
    if (insn->is_memory)
        memcpy((void *)kt_address(insn, frame), &value, (size_t)bits(insn) / 8);
    else
        kt_general_write(frame, insn->rm, value);
}

static uint64_t reg_read(const struct kt_insn *insn, const struct kt_frame *frame) {
    return cut(insn, kt_general(frame, insn->reg));
}

static uint64_t immediate(const struct kt_insn *insn) { return cut(insn, (uint64_t)(int64_t)insn->immediate); }

/* carries: of a sum, out of each bit; of a difference, the borrows. */
static void set_flags(const struct kt_insn *insn, struct kt_frame *frame, uint64_t result, uint64_t carries) {
    const int top = bits(insn) - 1;
    greg_t flags = frame->general[REG_EFL] & ~(greg_t)(CF | PF | AF | ZF | SF | OF);
    if (carries >> top & 1) flags |= CF;
    if (!__builtin_parityll(result & 0xFF)) flags |= PF;
    if (carries >> 3 & 1) flags |= AF;
    if (!result) flags |= ZF;
    if (result >> top & 1) flags |= SF;
    if ((carries >> top ^ carries >> (top - 1)) & 1) flags |= OF;
    frame->general[REG_EFL] = flags;
}

static uint64_t sum(const struct kt_insn *insn, struct kt_frame *frame, uint64_t a, uint64_t b) {
    const uint64_t result = cut(insn, a + b);
    set_flags(insn, frame, result, (a & b) | ((a | b) & ~result));
    return result;
}

static uint64_t difference(const struct kt_insn *insn, struct kt_frame *frame, uint64_t a, uint64_t b) {
    const uint64_t result = cut(insn, a - b);
    set_flags(insn, frame, result, (~a & b) | (~(a ^ b) & result));
    return result;
}

static uint64_t only_one(const struct kt_insn *insn, struct kt_frame *frame, uint64_t a, uint64_t b) {
    set_flags(insn, frame, a ^ b, 0);
    return a ^ b;
}

static uint64_t both(const struct kt_insn *insn, struct kt_frame *frame, uint64_t a, uint64_t b) {
    set_flags(insn, frame, a & b, 0);
    return a & b;
}

/* The forms of an operation: of rm and a number, of rm and reg, and of reg and rm; the first of the two takes the result. */
#define FORMS(name, operation)                                                                                   \
    static void name##_number(const struct kt_insn *insn, struct kt_frame *frame) {                              \
        rm_write(insn, frame, operation(insn, frame, rm_read(insn, frame), immediate(insn)));                    \
    }                                                                                                            \
    static void name##_rm(const struct kt_insn *insn, struct kt_frame *frame) {                                  \
        rm_write(insn, frame, operation(insn, frame, rm_read(insn, frame), reg_read(insn, frame)));              \
    }                                                                                                            \
    static void name##_reg(const struct kt_insn *insn, struct kt_frame *frame) {                                 \
        kt_general_write(frame, insn->reg, operation(insn, frame, reg_read(insn, frame), rm_read(insn, frame))); \
    }

FORMS(add, sum)
FORMS(sub, difference)
FORMS(and, both)
FORMS(xor, only_one)

static void cmp_number(const struct kt_insn *insn, struct kt_frame *frame) {
    difference(insn, frame, rm_read(insn, frame), immediate(insn));
}

static void cmp_rm(const struct kt_insn *insn, struct kt_frame *frame) {
    difference(insn, frame, rm_read(insn, frame), reg_read(insn, frame));
}

static void cmp_reg(const struct kt_insn *insn, struct kt_frame *frame) {
    difference(insn, frame, reg_read(insn, frame), rm_read(insn, frame));
}

static void test(const struct kt_insn *insn, struct kt_frame *frame) {
    both(insn, frame, rm_read(insn, frame), reg_read(insn, frame));
}

/* CF and OF: the product does not fit. The other flags are undefined, and stay. */
static void imul(const struct kt_insn *insn, struct kt_frame *frame) {
    const int unused = 64 - bits(insn);
    const int64_t a = (int64_t)(reg_read(insn, frame) << unused) >> unused;
    const int64_t b = (int64_t)(rm_read(insn, frame) << unused) >> unused;
    const __int128 product = (__int128)a * b;
    const bool fits = insn->w ? product == (int64_t)product : product == (int32_t)product;
    frame->general[REG_EFL] = (frame->general[REG_EFL] & ~(greg_t)(CF | OF)) | (fits ? 0 : CF | OF);
    kt_general_write(frame, insn->reg, cut(insn, (uint64_t)product));
}

/* CF: the last bit that went out. OF is defined for one bit alone: the sign before. AF is not. */
static void shift_right(const struct kt_insn *insn, struct kt_frame *frame, int count) {
    const uint64_t before = rm_read(insn, frame), result = count ? before >> count : before;
    if (count) {
        set_flags(insn, frame, result, 0);
        if (before >> (count - 1) & 1) frame->general[REG_EFL] |= CF;
        if (before >> (bits(insn) - 1) & 1 && count == 1) frame->general[REG_EFL] |= OF;
    }
    rm_write(insn, frame, result);
}

/* The same, but that OF tells whether the sign changed. */
static void shift_left(const struct kt_insn *insn, struct kt_frame *frame, int count) {
    const uint64_t before = rm_read(insn, frame), result = cut(insn, before << count);
    if (count) {
        set_flags(insn, frame, result, 0);
        if (before >> (bits(insn) - count) & 1) frame->general[REG_EFL] |= CF;
        if ((before ^ result) >> (bits(insn) - 1) & 1 && count == 1) frame->general[REG_EFL] |= OF;
    }
    rm_write(insn, frame, result);
}

#define SHIFTS(name, operation)                                                     \
    static void name##_number(const struct kt_insn *insn, struct kt_frame *frame) { \
        operation(insn, frame, insn->immediate & (bits(insn) - 1));                 \
    }                                                                               \
    static void name##_one(const struct kt_insn *insn, struct kt_frame *frame) { operation(insn, frame, 1); }

SHIFTS(shl, shift_left)
SHIFTS(shr, shift_right)

static void lea(const struct kt_insn *insn, struct kt_frame *frame) {
    kt_general_write(frame, insn->reg, cut(insn, kt_address(insn, frame)));
}

static void mov_reg(const struct kt_insn *insn, struct kt_frame *frame) {
    kt_general_write(frame, insn->reg, rm_read(insn, frame));
}

static void mov_rm(const struct kt_insn *insn, struct kt_frame *frame) { rm_write(insn, frame, reg_read(insn, frame)); }

static void movslq(const struct kt_insn *insn, struct kt_frame *frame) {
    int32_t value = insn->is_memory ? 0 : (int32_t)kt_general(frame, insn->rm);
    if (insn->is_memory) memcpy(&value, (const void *)kt_address(insn, frame), sizeof value);
    kt_general_write(frame, insn->reg, (uint64_t)(int64_t)value);
}

static void cltq(const struct kt_insn *insn, struct kt_frame *frame) {
    (void)insn;
    frame->general[REG_RAX] = (int32_t)frame->general[REG_RAX];
}

static void prefetch(const struct kt_insn *insn, struct kt_frame *frame) {
    (void)insn;
    (void)frame;
}

/* The opcode's low bits say which flags, and its last one whether they have to be the other way. RIP moves on to the next
 * instruction afterwards, which the distance counts from. */
static void jump_if(const struct kt_insn *insn, struct kt_frame *frame) {
    const greg_t flags = frame->general[REG_EFL];
    const bool less = !(flags & SF) != !(flags & OF);
    const bool conditions[] = {flags & OF, flags & CF, flags & ZF, flags & (CF | ZF),
                               flags & SF, flags & PF, less,       less || flags & ZF};
    if (conditions[insn->opcode->opcode >> 1 & 7] != (insn->opcode->opcode & 1)) frame->general[REG_RIP] += insn->immediate;
}

static bool writes_reg(const struct kt_insn *insn) { return insn->reg != RSP; }

static bool writes_rm(const struct kt_insn *insn) { return insn->is_memory || insn->rm != RSP; }

static bool reads(const struct kt_insn *insn) {
    (void)insn;
    return true;
}

static bool accepts_add(const struct kt_insn *insn) { return writes_rm(insn) && insn->modrm_reg == 0; }

static bool accepts_and(const struct kt_insn *insn) { return writes_rm(insn) && insn->modrm_reg == 4; }

static bool accepts_sub(const struct kt_insn *insn) { return writes_rm(insn) && insn->modrm_reg == 5; }

static bool accepts_xor(const struct kt_insn *insn) { return writes_rm(insn) && insn->modrm_reg == 6; }

static bool accepts_cmp(const struct kt_insn *insn) { return insn->modrm_reg == 7; }

static bool accepts_shl(const struct kt_insn *insn) { return writes_rm(insn) && insn->modrm_reg == 4; }

static bool accepts_shr(const struct kt_insn *insn) { return writes_rm(insn) && insn->modrm_reg == 5; }

static bool accepts_lea(const struct kt_insn *insn) { return insn->is_memory && writes_reg(insn); }

static bool accepts_movslq(const struct kt_insn *insn) { return insn->w && writes_reg(insn); }

static bool accepts_cltq(const struct kt_insn *insn) { return insn->w; }

static bool accepts_prefetch(const struct kt_insn *insn) { return insn->is_memory && insn->modrm_reg <= 3; }

static bool accepts_jump(const struct kt_insn *insn) { return !insn->w; }

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
#define JUMP(name, condition)                                          \
    NATIVE(name, 0, 0x70 + condition, true, 1, accepts_jump, jump_if), \
        NATIVE(name ", near", 1, 0x80 + condition, true, 4, accepts_jump, jump_if)

static struct kt_opcode opcodes[] = {
    NATIVE("add", 0, 0x83, false, 1, accepts_add, add_number),
    NATIVE("add", 0, 0x81, false, 4, accepts_add, add_number),
    NATIVE("add", 0, 0x01, false, 0, writes_rm, add_rm),
    NATIVE("add", 0, 0x03, false, 0, writes_reg, add_reg),
    NATIVE("sub", 0, 0x83, false, 1, accepts_sub, sub_number),
    NATIVE("sub", 0, 0x81, false, 4, accepts_sub, sub_number),
    NATIVE("sub", 0, 0x29, false, 0, writes_rm, sub_rm),
    NATIVE("sub", 0, 0x2B, false, 0, writes_reg, sub_reg),
    NATIVE("and", 0, 0x83, false, 1, accepts_and, and_number),
    NATIVE("and", 0, 0x81, false, 4, accepts_and, and_number),
    NATIVE("and", 0, 0x21, false, 0, writes_rm, and_rm),
    NATIVE("and", 0, 0x23, false, 0, writes_reg, and_reg),
    NATIVE("xor", 0, 0x83, false, 1, accepts_xor, xor_number),
    NATIVE("xor", 0, 0x31, false, 0, writes_rm, xor_rm),
    NATIVE("xor", 0, 0x33, false, 0, writes_reg, xor_reg),
    NATIVE("cmp", 0, 0x83, false, 1, accepts_cmp, cmp_number),
    NATIVE("cmp", 0, 0x81, false, 4, accepts_cmp, cmp_number),
    NATIVE("cmp", 0, 0x39, false, 0, reads, cmp_rm),
    NATIVE("cmp", 0, 0x3B, false, 0, reads, cmp_reg),
    NATIVE("test", 0, 0x85, false, 0, reads, test),
    NATIVE("imul", 1, 0xAF, false, 0, writes_reg, imul),
    NATIVE("shl", 0, 0xC1, false, 1, accepts_shl, shl_number),
    NATIVE("shl", 0, 0xD1, false, 0, accepts_shl, shl_one),
    NATIVE("shr", 0, 0xC1, false, 1, accepts_shr, shr_number),
    NATIVE("shr", 0, 0xD1, false, 0, accepts_shr, shr_one),
    NATIVE("lea", 0, 0x8D, false, 0, accepts_lea, lea),
    NATIVE("mov", 0, 0x8B, false, 0, writes_reg, mov_reg),
    NATIVE("mov", 0, 0x89, false, 0, writes_rm, mov_rm),
    NATIVE("movslq", 0, 0x63, false, 0, accepts_movslq, movslq),
    NATIVE("cltq", 0, 0x98, true, 0, accepts_cltq, cltq),
    NATIVE("prefetch", 1, 0x18, false, 0, accepts_prefetch, prefetch),
    JUMP("jb", 2),
    JUMP("jae", 3),
    JUMP("je", 4),
    JUMP("jne", 5),
    JUMP("jbe", 6),
    JUMP("ja", 7),
    JUMP("jl", 12),
    JUMP("jge", 13),
    JUMP("jle", 14),
    JUMP("jg", 15),
};

struct kt_group kt_loops = {opcodes, sizeof opcodes / sizeof *opcodes};
