/* Registers of the interrupted thread, read and written in its signal frame.
 *
 * The kernel leaves the vector state there as an XSAVE area in standard format:
 *
 *   0      FXSAVE: x87, MXCSR at 24, xmm0-15 at 160, and software bytes at 464 that say what follows
 *   512    XSAVE header: XSTATE_BV (8 bytes), a bit per component; clear = initial state, whatever the bytes say
 *   576    AVX (2): upper halves of ymm0-15
 *   CPUID  opmask (5): k0-7; ZMM_Hi256 (6): upper halves of zmm0-15; Hi16_ZMM (7): zmm16-31, whole
 *          XTILECFG (17): AMX configuration, on a CPU that has AMX; XTILEDATA (18) if the process may use it
 *
 * On return the kernel restores from it, so a component that is written must have its bit set, and the rest of it zeroed
 * first if the bit was clear. */
#include "emulator.h"

#include <cpuid.h>
#include <string.h>

enum { SSE = 1, AVX = 2, OPMASK = 5, ZMM_HI256 = 6, HI16_ZMM = 7, XTILECFG = 17, XTILEDATA = 18, COMPONENTS = XTILEDATA };
enum { MXCSR_OFFSET = 24, XMM_OFFSET = 160, SOFTWARE_OFFSET = 464, HEADER_OFFSET = 512 };
#define INLINE static inline __attribute__((always_inline)) /* the copies' lengths become constants */
#define FP_XSTATE_MAGIC1 0x46505853u

static struct {
    uint32_t offset, bytes;
} component[COMPONENTS];

/* The kernel's struct _fpx_sw_bytes, which no libc header shows under one name. */
struct software_bytes {
    uint32_t magic1, extended_size;
    uint64_t features;
    uint32_t xstate_size;
};

bool kt_frame_layout(void) {
    static _Atomic bool known; /* a virtual machine takes long to answer */
    if (atomic_load(&known)) return true;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw")) return false;
    component[SSE].offset = XMM_OFFSET;
    component[SSE].bytes = 16 * 16;
    for (int c = AVX; c < COMPONENTS; c++) {
        uint32_t eax, ebx, ecx, edx;
        if (!__get_cpuid_count(0xD, c, &eax, &ebx, &ecx, &edx)) return false;
        component[c].offset = ebx;
        component[c].bytes = eax;
    }
    atomic_store(&known, true);
    return true;
}

bool kt_frame_open(struct kt_frame *frame, void *ucontext) {
    const uint64_t needed = 1 << SSE | 1 << AVX | 1 << OPMASK | 1 << ZMM_HI256 | 1 << HI16_ZMM;
    mcontext_t *context = &((ucontext_t *)ucontext)->uc_mcontext;
    struct software_bytes software;
    if (!context->fpregs) return false;
    frame->general = context->gregs;
    frame->xsave = (uint8_t *)context->fpregs;
    memcpy(&software, frame->xsave + SOFTWARE_OFFSET, sizeof software);
    frame->features = software.features;
    frame->tiles = NULL;
    return software.magic1 == FP_XSTATE_MAGIC1 && (software.features & needed) == needed;
}

static uint64_t xstate_bv(const struct kt_frame *frame) {
    uint64_t bits;
    memcpy(&bits, frame->xsave + HEADER_OFFSET, sizeof bits);
    return bits;
}

INLINE void read_component(const struct kt_frame *frame, int c, int at, void *value, int bytes) {
    if (xstate_bv(frame) >> c & 1)
        memcpy(value, frame->xsave + component[c].offset + at, bytes);
    else
        memset(value, 0, bytes);
}

INLINE void write_component(struct kt_frame *frame, int c, int at, const void *value, int bytes) {
    uint64_t bits = xstate_bv(frame);
    if (!(bits >> c & 1)) {
        memset(frame->xsave + component[c].offset, 0, component[c].bytes);
        bits |= 1ull << c;
        memcpy(frame->xsave + HEADER_OFFSET, &bits, sizeof bits);
    }
    memcpy(frame->xsave + component[c].offset + at, value, bytes);
}

void kt_zmm_read(const struct kt_frame *frame, int n, void *value_64_bytes) {
    uint8_t *value = value_64_bytes;
    if (n >= 16) {
        read_component(frame, HI16_ZMM, (n - 16) * 64, value, 64);
        return;
    }
    read_component(frame, SSE, n * 16, value, 16);
    read_component(frame, AVX, n * 16, value + 16, 16);
    read_component(frame, ZMM_HI256, n * 32, value + 32, 32);
}

void kt_zmm_write(struct kt_frame *frame, int n, const void *value, int bytes) {
    uint8_t whole[KT_ZMM_BYTES] = {0};
    memcpy(whole, value, bytes);
    if (n >= 16) {
        write_component(frame, HI16_ZMM, (n - 16) * 64, whole, 64);
        return;
    }
    write_component(frame, SSE, n * 16, whole, 16);
    write_component(frame, AVX, n * 16, whole + 16, 16);
    write_component(frame, ZMM_HI256, n * 32, whole + 32, 32);
}

uint32_t kt_mxcsr_read(const struct kt_frame *frame) {
    uint32_t value;
    memcpy(&value, frame->xsave + MXCSR_OFFSET, sizeof value);
    return value;
}

uint64_t kt_mask_read(const struct kt_frame *frame, int n) {
    uint64_t value;
    read_component(frame, OPMASK, n * 8, &value, sizeof value);
    return value;
}

bool kt_cpu_holds_tile_config(const struct kt_frame *frame) { return frame->features >> XTILECFG & 1; }

bool kt_cpu_holds_tile_data(const struct kt_frame *frame) { return frame->features >> XTILEDATA & 1; }

void kt_tile_config_read(const struct kt_frame *frame, struct kt_tile_config *config) {
    read_component(frame, XTILECFG, 0, config, sizeof *config);
}

void kt_tile_config_write(struct kt_frame *frame, const struct kt_tile_config *config) {
    write_component(frame, XTILECFG, 0, config, sizeof *config);
}

static const int8_t slot[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

uint64_t kt_general(const struct kt_frame *frame, int n) { return (uint64_t)frame->general[slot[n]]; }

void kt_general_write(struct kt_frame *frame, int n, uint64_t value) { frame->general[slot[n]] = (greg_t)value; }

uint64_t kt_scaled_index(const struct kt_insn *insn, const struct kt_frame *frame) {
    return insn->index == KT_NO_REGISTER ? 0 : kt_general(frame, insn->index) * (uint64_t)insn->scale;
}

uintptr_t kt_address(const struct kt_insn *insn, const struct kt_frame *frame) {
    uint64_t address = (uint64_t)insn->displacement;
    if (insn->base == KT_RIP) /* counted from the next instruction */
        address += (uint64_t)frame->general[REG_RIP] + (uint64_t)insn->length;
    else if (insn->base != KT_NO_REGISTER)
        address += kt_general(frame, insn->base);
    return address + kt_scaled_index(insn, frame);
}

void kt_rm_read(const struct kt_insn *insn, const struct kt_frame *frame, uint64_t wanted, uint32_t value[16]) {
    if (!insn->is_memory) {
        kt_zmm_read(frame, insn->rm, value);
        return;
    }
    const uint8_t *memory = (const uint8_t *)kt_address(insn, frame);
    const int elements = insn->vector_bytes / 4;
    if (elements == 16 && !insn->broadcast && (wanted & 0xFFFF) == 0xFFFF) {
        memcpy(value, memory, KT_ZMM_BYTES);
        return;
    }
    memset(value, 0, KT_ZMM_BYTES);
    for (int i = 0; i < elements; i++)
        if (wanted >> i & 1) memcpy(&value[i], insn->broadcast ? memory : memory + 4 * i, 4);
}
