/* AVX512_VBMI: VPMULTISHIFTQB and VPERMB, and GFNI: VGF2P8AFFINEQB, after the operation sections of Intel's Software Developer's
 * Manual.
 *
 *   VPMULTISHIFTQB dest, control, source
 *       byte i of a qword of dest = the 8 bits of source's qword from bit (byte i of control) mod 64 on; bit 0 follows bit 63
 *
 *   VPERMB dest, index, source
 *       a byte of dest = the byte of source whose number is index's byte, modulo the vector's length
 *
 *   VGF2P8AFFINEQB dest, source, matrix, imm8
 *       bit i of a byte of dest = the parity of source's byte AND byte 7 - i of the matrix, its qword, XOR bit i of imm8
 *
 * The mask is by bytes, a broadcast by qwords; VPERMB has none. Computed with AVX-512F and BW. */
#include "emulator.h"

#include <immintrin.h>
#include <string.h>

static int full_tuple(const struct kt_insn *insn) { return insn->broadcast ? 8 : insn->vector_bytes; }

static bool accepts(const struct kt_insn *insn) {
    return insn->w && insn->vector_bytes && !(insn->zeroing && !insn->mask) && !(insn->broadcast && !insn->is_memory);
}

static bool accepts_permb(const struct kt_insn *insn) {
    return !insn->w && insn->vector_bytes && !(insn->zeroing && !insn->mask) && !insn->broadcast;
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

__attribute__((target("avx512bw"))) static void write(const struct kt_insn *insn, struct kt_frame *frame, __m512i result) {
    uint32_t dest[16];
    kt_zmm_read(frame, insn->reg, dest);
    if (insn->mask) {
        const __m512i kept = insn->zeroing ? _mm512_setzero_si512() : _mm512_loadu_si512(dest);
        result = _mm512_mask_mov_epi8(kept, kt_mask_read(frame, insn->mask), result);
    }
    _mm512_storeu_si512(dest, result);
    kt_zmm_write(frame, insn->reg, dest, insn->vector_bytes);
}

__attribute__((target("avx512bw"))) static void vpmultishiftqb(const struct kt_insn *insn, struct kt_frame *frame) {
    uint32_t control[16], source[16];
    kt_zmm_read(frame, insn->vvvv, control);
    read_qwords(insn, frame, source);
    const __m512i qwords = _mm512_loadu_si512(source);
    __m512i counts = _mm512_loadu_si512(control), result = _mm512_setzero_si512();
    for (int byte = 0; byte < 8; byte++, counts = _mm512_srli_epi64(counts, 8)) {
        /* A rotation takes its count mod 64; the byte that it brings to the bottom goes to its place. */
        const __m512i rotated = _mm512_and_si512(_mm512_rorv_epi64(qwords, counts), _mm512_set1_epi64(0xFF));
        result = _mm512_or_si512(result, _mm512_sll_epi64(rotated, _mm_cvtsi32_si128(8 * byte)));
    }
    write(insn, frame, result);
}

__attribute__((target("avx512bw"))) static void vpermb(const struct kt_insn *insn, struct kt_frame *frame) {
    uint8_t index[64], result[64];
    uint32_t source[16];
    kt_zmm_read(frame, insn->vvvv, index);
    read_qwords(insn, frame, source);
    for (int byte = 0; byte < 64; byte++) result[byte] = ((const uint8_t *)source)[index[byte] & (insn->vector_bytes - 1)];
    write(insn, frame, _mm512_loadu_si512(result));
}

__attribute__((target("avx512bw"))) static void vgf2p8affineqb(const struct kt_insn *insn, struct kt_frame *frame) {
    uint8_t source[64], result[64];
    uint32_t qwords[16];
    const uint8_t *matrix = (const uint8_t *)qwords;
    kt_zmm_read(frame, insn->vvvv, source);
    read_qwords(insn, frame, qwords);
    for (int byte = 0; byte < 64; byte++) {
        result[byte] = (uint8_t)insn->immediate;
        for (int bit = 0; bit < 8; bit++)
            result[byte] ^= (uint8_t)(__builtin_parity(source[byte] & matrix[(byte & ~7) + 7 - bit]) << bit);
    }
    write(insn, frame, _mm512_loadu_si512(result));
}

static struct kt_opcode opcodes[] = {
    {.name = "vpmultishiftqb",
     .encoding = KT_EVEX,
     .map = 2,
     .prefix = 1,
     .opcode = 0x83,
     .accepts = accepts,
     .disp8_bytes = full_tuple,
     .execute = vpmultishiftqb},
    {.name = "vpermb",
     .encoding = KT_EVEX,
     .map = 2,
     .prefix = 1,
     .opcode = 0x8D,
     .accepts = accepts_permb,
     .disp8_bytes = full_tuple,
     .execute = vpermb},
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

struct kt_group kt_avx512_vbmi = {opcodes, sizeof opcodes / sizeof *opcodes};
