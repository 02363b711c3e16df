/* AMX-TILE: configuration, loads and stores, after the operation sections of Intel's Software Developer's Manual.
 *
 *   LDTILECFG m512, STTILECFG m512         the configuration; loading it zeroes all tiles, and palette 0 releases them
 *   TILERELEASE                            back to the initial state: no configuration
 *   TILEZERO tile
 *   TILELOADD tile, sibmem, TILELOADDT1    row r from base + displacement + r * (index * scale); T1 is a hint only
 *   TILESTORED sibmem, tile
 *
 * Loads and stores begin at the configuration's start_row, where an interrupted one would go on; the others do not heed it.
 * All set it to 0. Where the manual leaves room, it is as a CPU of family 6, model 167 does it: palette 0 is not checked any
 * further, TILEZERO does not mind the length of rows, and a start_row beyond the rows is an error for loads and stores. */
#include "emulator.h"

#include <string.h>

static bool plain(const struct kt_insn *insn) { return !insn->w && insn->vector_bytes == 16 && !insn->vvvv; }

static bool accepts_config(const struct kt_insn *insn) { return plain(insn) && insn->is_memory && !insn->modrm_reg; }

static bool accepts_release(const struct kt_insn *insn) {
    return plain(insn) && !insn->is_memory && !insn->modrm_reg && !insn->modrm_rm;
}

static bool accepts_tile(const struct kt_insn *insn) {
    return plain(insn) && !insn->is_memory && insn->reg < KT_TILES && !insn->modrm_rm;
}

static bool accepts_sibmem(const struct kt_insn *insn) {
    return plain(insn) && insn->is_memory && insn->reg < KT_TILES && insn->modrm_rm == 4;
}

/* The #GP conditions; true if there is none. */
static bool is_valid(const struct kt_insn *insn, const struct kt_frame *frame, const struct kt_tile_config *config) {
    if (config->palette > 1) return kt_error(insn, frame, "palette %d does not exist", config->palette, 0, 0);
    for (int i = 0; i < (int)sizeof config->reserved; i++)
        if (config->reserved[i]) return kt_error(insn, frame, "byte %d is reserved, but %d", 2 + i, config->reserved[i], 0);
    for (int i = 0; i < 16; i++) {
        const int rows = config->rows[i], bytes = config->row_bytes[i];
        if (i >= KT_TILES && (rows || bytes))
            return kt_error(insn, frame, "tmm%d does not exist, but has %d rows of %d bytes", i, rows, bytes);
        if (rows > KT_TILE_ROWS || bytes > KT_TILE_ROW_BYTES)
            return kt_error(insn, frame, "tmm%d has %d rows of %d bytes, more than 16 or 64", i, rows, bytes);
        if (!rows != !bytes) return kt_error(insn, frame, "tmm%d has %d rows of %d bytes", i, rows, bytes);
    }
    return true;
}

static void ldtilecfg(const struct kt_insn *insn, struct kt_frame *frame) {
    struct kt_tile_config config;
    memcpy(&config, (const void *)kt_address(insn, frame), sizeof config);
    if (!config.palette)
        memset(&config, 0, sizeof config);
    else if (!is_valid(insn, frame, &config))
        return;
    frame->tiles->config = config;
    memset(frame->tiles->tile, 0, sizeof frame->tiles->tile);
}

static void sttilecfg(const struct kt_insn *insn, struct kt_frame *frame) {
    memcpy((void *)kt_address(insn, frame), &frame->tiles->config, sizeof frame->tiles->config);
}

static void tilerelease(const struct kt_insn *insn, struct kt_frame *frame) {
    (void)insn;
    memset(&frame->tiles->config, 0, sizeof frame->tiles->config);
    memset(frame->tiles->tile, 0, sizeof frame->tiles->tile);
}

static bool is_configured(const struct kt_insn *insn, const struct kt_frame *frame) {
    const struct kt_tile_config *config = &frame->tiles->config;
    if (!config->palette) return kt_error(insn, frame, "no tiles are configured", 0, 0, 0);
    if (!config->rows[insn->reg]) return kt_error(insn, frame, "tmm%d is not configured", insn->reg, 0, 0);
    return true;
}

static void tilezero(const struct kt_insn *insn, struct kt_frame *frame) {
    if (!is_configured(insn, frame)) return;
    memset(&frame->tiles->tile[insn->reg], 0, sizeof frame->tiles->tile[insn->reg]);
    frame->tiles->config.start_row = 0;
}

static bool may_move(const struct kt_insn *insn, const struct kt_frame *frame) {
    if (!is_configured(insn, frame)) return false;
    const struct kt_tile_config *config = &frame->tiles->config;
    const int rows = config->rows[insn->reg], bytes = config->row_bytes[insn->reg];
    if (bytes % 4) return kt_error(insn, frame, "tmm%d has rows of %d bytes, not a multiple of 4", insn->reg, bytes, 0);
    if (config->start_row >= rows)
        return kt_error(insn, frame, "start_row is %d, but tmm%d has %d rows", config->start_row, insn->reg, rows);
    if (insn->index == KT_NO_REGISTER) /* a CPU takes a stride of 0, which nobody means */
        return kt_error(insn, frame, "the address has no index register, so rows have no stride", 0, 0, 0);
    return true;
}

static void tileloadd(const struct kt_insn *insn, struct kt_frame *frame) {
    if (!may_move(insn, frame)) return;
    struct kt_tile_config *config = &frame->tiles->config;
    struct kt_tile *tile = &frame->tiles->tile[insn->reg];
    const int rows = config->rows[insn->reg], bytes = config->row_bytes[insn->reg];
    const uint64_t stride = kt_scaled_index(insn, frame), first = kt_address(insn, frame) - stride;
    for (int r = config->start_row; r < rows; r++) memcpy(tile->row[r], (const void *)(first + r * stride), bytes);
    config->start_row = 0;
}

static void tilestored(const struct kt_insn *insn, struct kt_frame *frame) {
    if (!may_move(insn, frame)) return;
    struct kt_tile_config *config = &frame->tiles->config;
    const struct kt_tile *tile = &frame->tiles->tile[insn->reg];
    const int rows = config->rows[insn->reg], bytes = config->row_bytes[insn->reg];
    const uint64_t stride = kt_scaled_index(insn, frame), first = kt_address(insn, frame) - stride;
    for (int r = config->start_row; r < rows; r++) memcpy((void *)(first + r * stride), tile->row[r], bytes);
    config->start_row = 0;
}

#define VEX_0F38(name_, prefix_, opcode_, accepts_, execute_) \
    {.name = name_,                                           \
     .encoding = KT_VEX,                                      \
     .map = 2,                                                \
     .prefix = prefix_,                                       \
     .opcode = opcode_,                                       \
     .tiles = true,                                           \
     .accepts = accepts_,                                     \
     .execute = execute_}

static struct kt_opcode opcodes[] = {
    VEX_0F38("ldtilecfg", 0, 0x49, accepts_config, ldtilecfg),      VEX_0F38("sttilecfg", 1, 0x49, accepts_config, sttilecfg),
    VEX_0F38("tilerelease", 0, 0x49, accepts_release, tilerelease), VEX_0F38("tilezero", 3, 0x49, accepts_tile, tilezero),
    VEX_0F38("tileloadd", 3, 0x4B, accepts_sibmem, tileloadd),      VEX_0F38("tileloaddt1", 1, 0x4B, accepts_sibmem, tileloadd),
    VEX_0F38("tilestored", 2, 0x4B, accepts_sibmem, tilestored),
};

struct kt_group kt_amx_tiles = {opcodes, sizeof opcodes / sizeof *opcodes};
