/* Instruction decoder: bytes -> struct kt_insn, for the instructions of the listed groups and nothing else.
 *
 * An EVEX instruction, after its 62 byte (~ marks a field stored inverted):
 *
 *   byte 1   ~R ~X ~B ~R' 0 m m m       R' R: bits 4 3 of ModRM.reg; X B: bits 4 3 of a register ModRM.rm,
 *   byte 2   W ~v ~v ~v ~v 1 p p              or bit 3 of index and of base; mmm: map
 *   byte 3   z L' L b ~V' a a a         V' vvvv: second source; L'L: length; b: broadcast; aaa: mask register
 *   byte 4   opcode, then ModRM [SIB] [disp8*N | disp32]
 *
 * A VEX instruction, after its C4 byte:
 *
 *   byte 1   ~R ~X ~B m m m m m         R X B: bit 3 of ModRM.reg, of index, and of base or a register ModRM.rm
 *   byte 2   W ~v ~v ~v ~v L p p
 *   byte 3   opcode, then ModRM [SIB] [disp8 | disp32]
 *
 * or after its C5 byte, with map 1 and without X, B and W:
 *
 *   byte 1   ~R ~v ~v ~v ~v L p p
 *   byte 2   opcode, and so on
 *
 * Any other: [0100 W R X B] [0F] opcode [ModRM [SIB] [disp8 | disp32]]
 *
 * What the CPU refuses (#UD) must not be emulated either, or a test would pass with code that no CPU runs: reserved bits are
 * checked here, the rules of an instruction in its row's accepts(). Not decoded, as compilers do not emit them for these
 * instructions: segment and address-size prefixes, and APX's use of the reserved EVEX bits. */
#include "emulator.h"

#include <string.h>

static struct kt_group *const groups[] = {&kt_avx512_bf16, &kt_avx512_vbmi, &kt_vnni, &kt_amx_tiles,
                                          &kt_amx_dot,     &kt_between,     &kt_loops};

struct kt_opcode *kt_opcode_at(size_t i) {
    for (size_t g = 0; g < sizeof groups / sizeof *groups; g++) {
        if (i < groups[g]->count) return &groups[g]->opcodes[i];
        i -= groups[g]->count;
    }
    return NULL;
}

/* The first row from *group, *i on with this encoding, and then the place behind it; NULL if there is none. */
static struct kt_opcode *next_row(const struct kt_opcode *key, size_t *group, size_t *i) {
    for (; *group < sizeof groups / sizeof *groups; ++*group, *i = 0)
        while (*i < groups[*group]->count) {
            struct kt_opcode *row = &groups[*group]->opcodes[(*i)++];
            if (row->opcode == key->opcode && row->map == key->map && row->prefix == key->prefix &&
                row->encoding == key->encoding)
                return row;
        }
    return NULL;
}

/* What ModRM's three fields are widened with. */
struct extension {
    int reg;         /* added to reg */
    int rm_register; /* added to rm when it is a register */
    int base, index; /* added to a memory operand's base and index */
};

/* Reads the prefix, up to and including the opcode byte; 0 if it is none, else the bytes read. */
static int parse_evex(const uint8_t *code, struct kt_insn *insn, struct kt_opcode *key, struct extension *extension) {
    /* One byte at a time: the code may end, and its page with it, right after an instruction that is not ours. */
    if (code[0] != 0x62) return 0;
    const int p0 = code[1];
    if (p0 & 0x08) return 0;
    const int p1 = code[2];
    if (!(p1 & 0x04)) return 0;
    const int p2 = code[3];
    const int r = !(p0 & 0x80), x = !(p0 & 0x40), b = !(p0 & 0x20), r_high = !(p0 & 0x10), v_high = !(p2 & 0x08);
    const int length = p2 >> 5 & 3;

    key->map = p0 & 7;
    key->prefix = p1 & 3;
    key->opcode = code[4];
    insn->w = p1 >> 7;
    insn->vvvv = (~p1 >> 3 & 15) | v_high << 4;
    insn->vector_bytes = length < 3 ? 16 << length : 0;
    insn->zeroing = p2 >> 7;
    insn->broadcast = p2 >> 4 & 1;
    insn->mask = p2 & 7;
    *extension =
        (struct extension){.reg = r << 3 | r_high << 4, .rm_register = b << 3 | x << 4, .base = b << 3, .index = x << 3};
    return 5;
}

/* The same for VEX. */
static int parse_vex(const uint8_t *code, struct kt_insn *insn, struct kt_opcode *key, struct extension *extension) {
    const bool is_short = code[0] == 0xC5;
    if (!is_short && code[0] != 0xC4) return 0;
    const int p0 = is_short ? (code[1] & 0x80) | 0x61 : code[1]; /* as the long form says it: ~R, no X, no B, map 1 */
    const int p1 = is_short ? code[1] & 0x7F : code[2], bytes = is_short ? 3 : 4;
    const int r = !(p0 & 0x80), x = !(p0 & 0x40), b = !(p0 & 0x20);

    key->map = p0 & 31;
    key->prefix = p1 & 3;
    key->opcode = code[bytes - 1];
    insn->w = p1 >> 7;
    insn->vvvv = ~p1 >> 3 & 15;
    insn->vector_bytes = 16 << (p1 >> 2 & 1);
    *extension = (struct extension){.reg = r << 3, .rm_register = b << 3, .base = b << 3, .index = x << 3};
    return bytes;
}

/* The same for an instruction with neither; never 0. */
static int parse_legacy(const uint8_t *code, struct kt_insn *insn, struct kt_opcode *key, struct extension *extension) {
    int at = 0;
    const int rex = (code[0] & 0xF0) == 0x40 ? code[at++] : 0;
    const int r = rex >> 2 & 1, x = rex >> 1 & 1, b = rex & 1;
    if (code[at] == 0x0F) {
        key->map = 1;
        at++;
    }
    key->opcode = code[at++];
    insn->w = rex >> 3 & 1;
    *extension = (struct extension){.reg = r << 3, .rm_register = b << 3, .base = b << 3, .index = x << 3};
    return at;
}

static int32_t load_disp32(const uint8_t *code) {
    int32_t value;
    memcpy(&value, code, sizeof value);
    return value;
}

/* Reads SIB and displacement of a memory operand; returns the bytes read. */
static int parse_address(const uint8_t *code, struct kt_insn *insn, const struct extension *extension, int disp8_bytes) {
    int at = 0;
    bool has_disp32 = insn->modrm_mod == 2;
    if (insn->modrm_rm == 4) { /* rsp and r12 as a base need the SIB byte, so 100 means that one follows */
        const int sib = code[at++];
        insn->scale = 1 << (sib >> 6);
        insn->index = (sib >> 3 & 7) | extension->index;
        if (insn->index == 4) /* only rsp cannot be an index; r12 can */
            insn->index = KT_NO_REGISTER;
        insn->base = (sib & 7) | extension->base;
        if ((sib & 7) == 5 && insn->modrm_mod == 0) {
            insn->base = KT_NO_REGISTER;
            has_disp32 = true;
        }
    } else if (insn->modrm_rm == 5 && insn->modrm_mod == 0) {
        insn->base = KT_RIP;
        has_disp32 = true;
    } else {
        insn->base = insn->modrm_rm | extension->base;
    }
    if (has_disp32) {
        insn->displacement = load_disp32(code + at);
        at += 4;
    } else if (insn->modrm_mod == 1) {
        insn->displacement = (int8_t)code[at++] * (int64_t)disp8_bytes;
    }
    return at;
}

bool kt_decode(const uint8_t *code, struct kt_insn *insn) {
    struct kt_opcode key = {.encoding = KT_EVEX};
    size_t group = 0, i = 0;
    struct extension extension;
    memset(insn, 0, sizeof *insn);
    insn->base = insn->index = KT_NO_REGISTER;
    insn->scale = 1;

    int at = parse_evex(code, insn, &key, &extension);
    if (!at) {
        key.encoding = KT_VEX;
        at = parse_vex(code, insn, &key, &extension);
    }
    if (!at) {
        key.encoding = KT_LEGACY;
        at = parse_legacy(code, insn, &key, &extension);
    }
    /* Before looking at the ModRM byte: an opcode without one may end its page here. */
    insn->opcode = next_row(&key, &group, &i);
    if (!insn->opcode) return false;

    if (!insn->opcode->no_modrm) {
        const int modrm = code[at++];
        insn->modrm_mod = modrm >> 6;
        insn->modrm_reg = modrm >> 3 & 7;
        insn->modrm_rm = modrm & 7;
        insn->is_memory = insn->modrm_mod != 3;
        insn->reg = insn->modrm_reg | extension.reg;
        insn->rm = insn->modrm_rm | extension.rm_register;
    }

    while (insn->opcode && !insn->opcode->accepts(insn)) insn->opcode = next_row(&key, &group, &i);
    if (!insn->opcode) return false;
    const int disp8_bytes = insn->opcode->disp8_bytes ? insn->opcode->disp8_bytes(insn) : 1;
    if (insn->is_memory) at += parse_address(code + at, insn, &extension, disp8_bytes);
    const int immediate_bytes = insn->opcode->immediate_bytes;
    if (immediate_bytes) insn->immediate = immediate_bytes == 1 ? (int8_t)code[at] : load_disp32(code + at);
    insn->length = at + immediate_bytes;
    return true;
}
