/* GFNI: VGF2P8AFFINEQB, after the operation section of Intel's Software Developer's Manual.
 *
 *   VGF2P8AFFINEQB dest, source, matrix, imm8
 *       bit i of a byte of dest = the parity of source's byte AND byte 7 - i of the matrix, its qword, XOR bit i of imm8
 *
 * The mask is by bytes, a broadcast, of matrices, by qwords. Computed with AVX-512F and BW. */
#include "emulator.h"

#include <immintrin.h>
#include <string.h>

static int full_tuple(const struct kt_insn *insn) { return insn->broadcast ? 8 : insn->vector_bytes; }

static bool accepts(const struct kt_insn *insn) {
    return insn->w && insn->vector_bytes && !(insn->zeroing && !insn->mask) && !(insn->broadcast && !insn->is_memory);
}

/* All of it: this instruction does not suppress faults of masked-out elements. */
static void read_qwords(const struct kt_insn *insn, const struct kt_frame *frame, uint32_t value[16]) {
    if (!insn->broadcast) {
        kt_rm_read(insn, frame, ~0ull, value);
        return;
    }
    const void *qword = (const void *)kt_address(insn, frame);
    for (int i = 0; i < 16; i += 2) memcpy(&value[i], qword, 8);
}

__attribute__((target("avx512bw"))) static void vgf2p8affineqb(const struct kt_insn *insn, struct kt_frame *frame) {
    uint8_t source[64], matrix[64], result[64];
    uint32_t qwords[16], dest[16];
    kt_zmm_read(frame, insn->vvvv, source);
    read_qwords(insn, frame, qwords);
    memcpy(matrix, qwords, sizeof matrix);
    kt_zmm_read(frame, insn->reg, dest);
    for (int byte = 0; byte < 64; byte++) {
        result[byte] = (uint8_t)insn->immediate;
        for (int bit = 0; bit < 8; bit++)
            result[byte] ^= (uint8_t)(__builtin_parity(source[byte] & matrix[(byte & ~7) + 7 - bit]) << bit);
    }
    const __m512i kept = insn->zeroing ? _mm512_setzero_si512() : _mm512_loadu_si512(dest);
    const uint64_t where = insn->mask ? kt_mask_read(frame, insn->mask) : ~0ull;
    _mm512_storeu_si512(dest, _mm512_mask_mov_epi8(kept, where, _mm512_loadu_si512(result)));
    kt_zmm_write(frame, insn->reg, dest, insn->vector_bytes);
}

static struct kt_opcode opcodes[] = {
    {.name = "vgf2p8affineqb",
     .encoding = KT_EVEX,
     .map = 3,
     .prefix = 1,
     .opcode = 0xCE,
     .immediate_bytes = 1,
     .accepts = accepts,
     .disp8_bytes = full_tuple,
     .execute = vgf2p8affineqb},
};

struct kt_group kt_gfni = {opcodes, sizeof opcodes / sizeof *opcodes};
