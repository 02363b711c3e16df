/* Packing q4 with one-byte scales per 32 k: a checkpoint's bytes to panels and back, exactly.
 *
 * LAYOUT of a panel: superblocks in ascending k, each 64 scale bytes (one a column), then 1024 bytes of codes:
 *
 *     code dword of (column c, k..k+7) at  64 + (c / 16) * 256 + (k / 8) * 64 + (c % 16) * 4
 *     its nibbles, low to high:            k0 k2 k4 k6 | k1 k3 k5 k7
 *
 * so a 64-byte vector holds 8 k of 16 columns, and its words shifted right by 0, 4, 8, 12 hold the k-pairs (0,1), (2,3),
 * (4,5), (6,7) in the low bits of each column's two words: the pair order of VDPBF16PS and TDPBF16PS.
 * Padding (columns beyond n, k beyond the matrix) has the code of zero and the scale 1 (byte 127).
 */
#include <string.h>

#include "driver.h"

enum { SUPERBLOCK_BYTES = KT_PANEL + KT_PANEL * KT_GROUP / 2, ROW_BYTES = KT_GROUP / 2, SCALE_ONE = 127 };

size_t kt_q4_panel_bytes(size_t k) { return kt_round_up(k, KT_GROUP) / KT_GROUP * SUPERBLOCK_BYTES; }

/* k0 k1 .. k7 from the lowest nibble up -> k0 k2 k4 k6 k1 k3 k5 k7. */
static uint32_t split_pairs(uint32_t v) {
    uint32_t even = v & 0x0F0F0F0F, odd = v >> 4 & 0x0F0F0F0F;
    even = (even | even >> 4) & 0x00FF00FF;
    odd = (odd | odd >> 4) & 0x00FF00FF;
    even = (even | even >> 8) & 0x0000FFFF;
    odd = (odd | odd >> 8) & 0x0000FFFF;
    return even | odd << 16;
}

static uint32_t join_pairs(uint32_t v) {
    uint32_t even = v & 0x0000FFFF, odd = v >> 16;
    even = (even | even << 8) & 0x00FF00FF;
    odd = (odd | odd << 8) & 0x00FF00FF;
    even = (even | even << 4) & 0x0F0F0F0F;
    odd = (odd | odd << 4) & 0x0F0F0F0F;
    return even | odd << 4;
}

static uint8_t *code_dwords(uint8_t *superblock, size_t column) {
    return superblock + KT_PANEL + column / 16 * 256 + column % 16 * 4;
}

/* Four columns of one superblock, 16 code bytes each: rows of four dwords become columns of four, so that the compiler
 * transposes in registers. */
static void pack_four(const uint8_t *const rows[4], size_t offset, uint8_t *superblock, size_t column) {
    uint32_t v[4][4];
    for (int i = 0; i < 4; i++) memcpy(v[i], rows[i] + offset, ROW_BYTES);
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) v[i][j] = split_pairs(v[i][j]);
    uint8_t *to = code_dwords(superblock, column);
    for (int j = 0; j < 4; j++) {
        const uint32_t t[4] = {v[0][j], v[1][j], v[2][j], v[3][j]};
        memcpy(to + j * 64, t, sizeof t);
    }
}

static void pack_tail(const kt_q4_source *s, size_t row, size_t group, uint8_t *superblock, size_t column) {
    const uint8_t padding = s->zero_code | (uint8_t)(s->zero_code << 4);
    uint8_t bytes[ROW_BYTES];
    memset(bytes, padding, sizeof bytes);
    if (row < s->n) {
        const size_t row_bytes = s->k / 2, offset = group * ROW_BYTES, left = row_bytes - offset;
        memcpy(bytes, s->codes + row * row_bytes + offset, left < ROW_BYTES ? left : ROW_BYTES);
    }
    uint8_t *to = code_dwords(superblock, column);
    for (int j = 0; j < 4; j++) {
        uint32_t v;
        memcpy(&v, bytes + j * 4, 4);
        v = split_pairs(v);
        memcpy(to + j * 64, &v, 4);
    }
}

/* Groups innermost within four rows: the source is read a cache line at a time, and the few superblocks that a line
 * feeds stay in L1. */
static void pack_panel(const kt_q4_source *s, size_t panel, uint8_t *packed, kt_q4_scale_range *range) {
    enum { RUN = 8 }; /* superblocks that are filled together: 8 * 1088 bytes */
    const size_t groups = kt_round_up(s->k, KT_GROUP) / KT_GROUP, whole = s->k / KT_GROUP, row_bytes = s->k / 2;
    const size_t first = panel * KT_PANEL;
    uint8_t low = 255, high = 0;
    for (size_t run = 0; run < groups; run += RUN) {
        const size_t end = run + RUN < groups ? run + RUN : groups;
        for (size_t column = 0; column < KT_PANEL; column += 4) {
            const size_t row = first + column;
            const uint8_t *rows[4];
            for (size_t i = 0; i < 4; i++) rows[i] = s->codes + (row + i) * row_bytes;
            for (size_t g = run; g < end; g++) {
                uint8_t *superblock = packed + g * SUPERBLOCK_BYTES;
                if (row + 4 <= s->n && g < whole)
                    pack_four(rows, g * ROW_BYTES, superblock, column);
                else
                    for (size_t i = 0; i < 4; i++) pack_tail(s, row + i, g, superblock, column + i);
            }
        }
        for (size_t column = 0; column < KT_PANEL; column++) {
            uint8_t *to = packed + run * SUPERBLOCK_BYTES + column;
            if (first + column >= s->n) {
                for (size_t g = run; g < end; g++, to += SUPERBLOCK_BYTES) *to = SCALE_ONE;
                continue;
            }
            const uint8_t *from = s->scales + (first + column) * groups + run;
            for (size_t g = run; g < end; g++, from++, to += SUPERBLOCK_BYTES) {
                *to = *from;
                low = *from < low ? *from : low;
                high = *from > high ? *from : high;
            }
        }
    }
    *range = (kt_q4_scale_range){low, high};
}

static void unpack_panel(const uint8_t *packed, size_t n, size_t k, size_t panel, uint8_t *codes, uint8_t *scales) {
    const size_t groups = kt_round_up(k, KT_GROUP) / KT_GROUP, row_bytes = k / 2;
    for (size_t column = 0; column < KT_PANEL && panel * KT_PANEL + column < n; column++) {
        const size_t row = panel * KT_PANEL + column;
        for (size_t g = 0; g < groups; g++) {
            const uint8_t *superblock = packed + g * SUPERBLOCK_BYTES;
            scales[row * groups + g] = superblock[column];
            uint8_t bytes[ROW_BYTES];
            const uint8_t *from = superblock + KT_PANEL + column / 16 * 256 + column % 16 * 4;
            for (int j = 0; j < 4; j++) {
                uint32_t v;
                memcpy(&v, from + j * 64, 4);
                v = join_pairs(v);
                memcpy(bytes + j * 4, &v, 4);
            }
            const size_t left = row_bytes - g * ROW_BYTES;
            memcpy(codes + row * row_bytes + g * ROW_BYTES, bytes, left < ROW_BYTES ? left : ROW_BYTES);
        }
    }
}

typedef struct pack_job {
    const kt_q4_source *source;
    uint8_t *packed;
    size_t panels;
    _Atomic size_t next;
    _Atomic uint8_t low, high;
} pack_job;

static void pack_panels(void *context, size_t worker, size_t workers) {
    (void)worker, (void)workers;
    pack_job *j = context;
    const size_t panel_bytes = kt_q4_panel_bytes(j->source->k);
    for (size_t panel; (panel = atomic_fetch_add(&j->next, 1)) < j->panels;) {
        kt_q4_scale_range r;
        pack_panel(j->source, panel, j->packed + panel * panel_bytes, &r);
        uint8_t seen = atomic_load(&j->low);
        while (r.low < seen && !atomic_compare_exchange_weak(&j->low, &seen, r.low)) continue;
        seen = atomic_load(&j->high);
        while (r.high > seen && !atomic_compare_exchange_weak(&j->high, &seen, r.high)) continue;
    }
}

int kt_q4_pack(const kt_q4_source *s, uint8_t *packed, kt_q4_scale_range *range) {
    pack_job j = {.source = s, .packed = packed, .panels = kt_round_up(s->n, KT_PANEL) / KT_PANEL, .low = 255};
    kt_pool_lock();
    const int error = kt_pool_run(pack_panels, &j);
    kt_pool_unlock();
    *range = (kt_q4_scale_range){j.low, j.high};
    return error;
}

void kt_q4_unpack(const uint8_t *packed, size_t n, size_t k, uint8_t *codes, uint8_t *scales) {
    const size_t panel_bytes = kt_q4_panel_bytes(k);
    for (size_t panel = 0; panel * KT_PANEL < n; panel++)
        unpack_panel(packed + panel * panel_bytes, n, k, panel, codes, scales);
}
