/* Test-only emulation of x86-64 instructions that this CPU lacks: shared declarations.
 *
 * An instruction the CPU does not know raises SIGILL. The handler (trap.c) decodes it (decode.c), computes its result into
 * the registers saved in the signal frame (frame.c), steps over it and returns: shipped object code runs unchanged.
 *
 *   trap.c           install, uninstall, the handler, passing foreign signals on
 *   decode.c         bytes -> struct kt_insn: prefix, ModRM, SIB, displacement
 *   frame.c          registers of the interrupted thread: general, vector, mask; effective addresses
 *   tiles.c          AMX registers, which no signal frame holds: kept per thread
 *   errors.c         what a CPU would have faulted on, for the tests to read
 *   <group>.c        one file per instruction group: its opcode table and its semantics
 *   between.c        what the CPU does have, but kernels put between the others: emulated too, to save traps
 *   loops.c          the same of what general registers do there, so that loops go round
 *   known.c          instructions that were decoded before
 *
 * To add a group: write its file, declare its struct kt_group below, list it in decode.c. A new prefix is one more parse
 * function in decode.c. While a signal is handled nothing here takes memory from malloc, locks, or calls libc beyond memcpy
 * and its kin and bare system calls. */
#ifndef KT_EMULATOR_H
#define KT_EMULATOR_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* REG_RIP and its neighbours */
#endif
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <ucontext.h>

enum { KT_MAX_INSN_BYTES = 15, KT_ZMM_BYTES = 64 };

/* Register numbers as in the encoding (0 = rax ... 15 = r15), and two more that an address may have as its base. */
enum { KT_NO_REGISTER = -1, KT_RIP = -2 };

enum kt_encoding { KT_EVEX, KT_VEX, KT_LEGACY }; /* the last: neither, perhaps with a REX prefix */

struct kt_insn;
struct kt_frame;

/* One row of a group's table. A row matches when all four encoding fields do and accepts() agrees. */
struct kt_opcode {
    const char *name;
    enum kt_encoding encoding;
    uint8_t map, prefix, opcode; /* map: 0 = none, 1 = 0F, 2 = 0F38, 3 = 0F3A; prefix (pp): 0 = none, 1 = 66, 2 = F3, 3 = F2 */
    uint8_t immediate_bytes;     /* 0, 1 or 4 */
    bool no_modrm;
    bool native;                                /* the CPU has it: emulated only right behind one that it lacks */
    bool tiles;                                 /* works on frame->tiles; not emulated in a process whose tiles the CPU holds */
    bool (*accepts)(const struct kt_insn *);    /* false = the encoding is #UD, or another row's; sees all but the address */
    int (*disp8_bytes)(const struct kt_insn *); /* N of EVEX's disp8*N; NULL = 1 */
    void (*execute)(const struct kt_insn *, struct kt_frame *);
    _Atomic uint64_t executed;
};

struct kt_group {
    struct kt_opcode *opcodes;
    size_t count;
};

extern struct kt_group kt_avx512_bf16, kt_avx512_vbmi, kt_vnni, kt_between, kt_loops, kt_amx_tiles, kt_amx_dot;

struct kt_insn {
    struct kt_opcode *opcode;
    int length;       /* bytes, prefixes included */
    bool w;           /* EVEX.W, VEX.W, REX.W */
    int vector_bytes; /* 16, 32, 64; 0 for the reserved length */
    int reg, vvvv;    /* registers, 5 bits each, inversion undone; an unused vvvv reads 0 */
    int mask;         /* k register; 0 = no masking */
    bool zeroing, broadcast;
    bool is_memory; /* else rm is a register */
    int rm;
    int modrm_reg, modrm_rm, modrm_mod; /* as encoded, for tables that tell instructions apart by them */
    int base, index, scale;             /* general registers, KT_NO_REGISTER or (base) KT_RIP; scale is 1, 2, 4, 8 */
    int64_t displacement;
    int immediate; /* sign-extended */
};

enum { KT_TILES = 8, KT_TILE_ROWS = 16, KT_TILE_ROW_BYTES = 64 };

/* As LDTILECFG reads it from memory. */
struct kt_tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16]; /* colsb; those of tiles 8-15 are reserved, as in rows */
    uint8_t rows[16];
};

struct kt_tile {
    _Alignas(64) uint8_t row[KT_TILE_ROWS][KT_TILE_ROW_BYTES]; /* beyond the tile's shape always zero */
};

/* AMX state of one thread. */
struct kt_tiles {
    struct kt_tile tile[KT_TILES];
    struct kt_tile_config config; /* all zero = unconfigured */
    struct kt_tiles *next;        /* tiles.c */
    _Atomic int owner;
};

/* The interrupted thread. */
struct kt_frame {
    greg_t *general;
    uint8_t *xsave;         /* XSAVE area, standard (non-compacted) format */
    uint64_t features;      /* which components that holds */
    struct kt_tiles *tiles; /* NULL before kt_tiles_open */
};

/* decode.c. True if code starts with an instruction of some group; reads no byte beyond that instruction. */
bool kt_decode(const uint8_t *code, struct kt_insn *insn);
struct kt_opcode *kt_opcode_at(size_t i); /* over all groups; NULL past the end */

/* known.c. What kt_decode() finds, which is not asked where this address held the same bytes before; NULL where it finds nothing.
 * fresh: what the result may point to. */
const struct kt_insn *kt_known(const uint8_t *code, struct kt_insn *fresh);

/* frame.c */
bool kt_frame_layout(void); /* ask the CPU where its vector registers lie; false if it has no AVX-512 */
bool kt_frame_open(struct kt_frame *frame, void *ucontext); /* false if the frame holds no AVX-512 state */
uint64_t kt_general(const struct kt_frame *frame, int n);
void kt_general_write(struct kt_frame *frame, int n, uint64_t value);
uintptr_t kt_address(const struct kt_insn *insn, const struct kt_frame *frame);
uint64_t kt_scaled_index(const struct kt_insn *insn, const struct kt_frame *frame); /* part of the address */
/* The rm operand of a vector instruction as 32-bit elements, broadcast if it says so. Of memory only the elements in `wanted`
 * are touched, as a masked-out element does not fault; the others, and those beyond the vector, are 0. */
void kt_rm_read(const struct kt_insn *insn, const struct kt_frame *frame, uint64_t wanted, uint32_t value[16]);
void kt_zmm_read(const struct kt_frame *frame, int n, void *value_64_bytes);
void kt_zmm_write(struct kt_frame *frame, int n, const void *value, int bytes); /* zeroes the rest of the register */
uint32_t kt_mxcsr_read(const struct kt_frame *frame);
uint64_t kt_mask_read(const struct kt_frame *frame, int n);
bool kt_cpu_holds_tile_config(const struct kt_frame *frame);
bool kt_cpu_holds_tile_data(const struct kt_frame *frame);
void kt_tile_config_read(const struct kt_frame *frame, struct kt_tile_config *config); /* if the CPU holds it */
void kt_tile_config_write(struct kt_frame *frame, const struct kt_tile_config *config);

/* tiles.c. Sets frame->tiles; false if the CPU holds them itself, or there is no memory. Close after the last instruction. */
bool kt_tiles_open(struct kt_frame *frame);
void kt_tiles_close(struct kt_frame *frame);

/* errors.c. Records what is wrong with the instruction at the frame's RIP, which then must have no effect. `what` is a
 * literal with one %d for each value that it shows; the rest are 0. Always false, for callers to pass on. */
bool kt_error(const struct kt_insn *insn, const struct kt_frame *frame, const char *what, int a, int b, int c);
void kt_errors_reset(void);

#endif
