/* AVX512_VNNI and AVX-VNNI: VPDPBUSD and VPDPWSSD, after the operation section of Intel's Software Developer's Manual.
 *
 *   VPDPBUSD dest, a, b    dest[i] = dest[i] + a[4i] * b[4i] + ... + a[4i+3] * b[4i+3], modulo 2^32: a unsigned bytes, b signed
 *   VPDPWSSD dest, a, b    dest[i] = dest[i] + a[2i] * b[2i] + a[2i+1] * b[2i+1], modulo 2^32: signed words
 *
 * EVEX has masks and broadcasts and 32 registers, VEX has none of them. */
#include "emulator.h"

#include <string.h>

static int full_tuple(const struct kt_insn *insn) { return insn->broadcast ? 4 : insn->vector_bytes; }

static bool accepts_evex(const struct kt_insn *insn) {
    return !insn->w && insn->vector_bytes && !(insn->zeroing && !insn->mask) && !(insn->broadcast && !insn->is_memory);
}

static bool accepts_vex(const struct kt_insn *insn) { return !insn->w; }

static uint32_t dot_bytes(uint32_t sum, uint32_t a, uint32_t b) {
    for (int bit = 0; bit < 32; bit += 8) sum += (uint32_t)((int)(uint8_t)(a >> bit) * (int8_t)(b >> bit));
    return sum;
}

static uint32_t dot_words(uint32_t sum, uint32_t a, uint32_t b) {
    for (int bit = 0; bit < 32; bit += 16) sum += (uint32_t)((int16_t)(a >> bit) * (int16_t)(b >> bit));
    return sum;
}

/* Inlined, so that the loop over dwords is compiled for its product. */
static inline __attribute__((always_inline)) void each_dword(const struct kt_insn *insn, struct kt_frame *frame,
                                                             uint32_t (*dot)(uint32_t, uint32_t, uint32_t)) {
    const uint64_t mask = insn->mask ? kt_mask_read(frame, insn->mask) : ~0ull;
    uint32_t a[16], b[16], dest[16];
    kt_zmm_read(frame, insn->reg, dest);
    kt_zmm_read(frame, insn->vvvv, a);
    kt_rm_read(insn, frame, mask, b);
    for (int i = 0; i < insn->vector_bytes / 4; i++)
        dest[i] = mask >> i & 1 ? dot(dest[i], a[i], b[i]) : insn->zeroing ? 0 : dest[i];
    kt_zmm_write(frame, insn->reg, dest, insn->vector_bytes);
}

static void vpdpbusd(const struct kt_insn *insn, struct kt_frame *frame) { each_dword(insn, frame, dot_bytes); }
static void vpdpwssd(const struct kt_insn *insn, struct kt_frame *frame) { each_dword(insn, frame, dot_words); }

#define DOT(name_, opcode_, execute_, encoding_, accepts_, disp8_) \
    {.name = name_,                                                \
     .encoding = encoding_,                                        \
     .map = 2,                                                     \
     .prefix = 1,                                                  \
     .opcode = opcode_,                                            \
     .accepts = accepts_,                                          \
     .disp8_bytes = disp8_,                                        \
     .execute = execute_}

static struct kt_opcode opcodes[] = {
    DOT("vpdpbusd", 0x50, vpdpbusd, KT_EVEX, accepts_evex, full_tuple),
    DOT("vpdpbusd, VEX", 0x50, vpdpbusd, KT_VEX, accepts_vex, NULL),
    DOT("vpdpwssd, VEX", 0x52, vpdpwssd, KT_VEX, accepts_vex, NULL),
};

struct kt_group kt_vnni = {opcodes, sizeof opcodes / sizeof *opcodes};
