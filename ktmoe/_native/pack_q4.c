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

typedef uint32_t u32x4 __attribute__((vector_size(16)));

size_t kt_q4_panel_bytes(size_t k) { return kt_round_up(k, KT_GROUP) / KT_GROUP * SUPERBLOCK_BYTES; }

/* k0 k1 .. k7 from the lowest nibble up -> k0 k2 k4 k6 k1 k3 k5 k7, in four dwords: a dword is 8 k of one row. */
static inline u32x4 split_pairs(u32x4 v) {
    u32x4 even = v & 0x0F0F0F0F, odd = v >> 4 & 0x0F0F0F0F;
    even = (even | even >> 4) & 0x00FF00FF;
    odd = (odd | odd >> 4) & 0x00FF00FF;
    even = (even | even >> 8) & 0x0000FFFF;
    odd = (odd | odd >> 8) << 16;
    return even | odd;
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

/* a[i] b[i] a[i+1] b[i+1]. GCC before 12 has no __builtin_shufflevector, clang no __builtin_shuffle; without either, GCC
 * shuffles through memory, at 0.6 times the speed. */
#if __has_builtin(__builtin_shufflevector)
#define INTERLEAVE(a, b, i) __builtin_shufflevector(a, b, i, (i) + 4, (i) + 1, (i) + 5)
#else
#define INTERLEAVE(a, b, i) __builtin_shuffle(a, b, (u32x4){i, (i) + 4, (i) + 1, (i) + 5})
#endif

/* Four columns of one superblock, 16 code bytes each: rows of four dwords become columns of four. */
static inline void pack_four(const uint8_t *const rows[4], size_t offset, uint8_t *superblock, size_t column) {
    u32x4 v[4];
    for (int i = 0; i < 4; i++) {
        memcpy(&v[i], rows[i] + offset, sizeof v[i]);
        v[i] = split_pairs(v[i]);
    }
    const u32x4 low02 = INTERLEAVE(v[0], v[2], 0), low13 = INTERLEAVE(v[1], v[3], 0);
    const u32x4 high02 = INTERLEAVE(v[0], v[2], 2), high13 = INTERLEAVE(v[1], v[3], 2);
    const u32x4 columns[4] = {INTERLEAVE(low02, low13, 0), INTERLEAVE(low02, low13, 2), INTERLEAVE(high02, high13, 0),
                              INTERLEAVE(high02, high13, 2)};
    for (int j = 0; j < 4; j++) memcpy(code_dwords(superblock, column) + j * 64, &columns[j], sizeof columns[j]);
}

static void pack_tail(const kt_q4_source *s, size_t row, size_t group, uint8_t *superblock, size_t column) {
    const uint8_t padding = s->zero_code | (uint8_t)(s->zero_code << 4);
    uint8_t bytes[ROW_BYTES];
    memset(bytes, padding, sizeof bytes);
    if (row < s->n) {
        const size_t row_bytes = s->k / 2, offset = group * ROW_BYTES, left = row_bytes - offset;
        memcpy(bytes, s->codes + row * row_bytes + offset, left < ROW_BYTES ? left : ROW_BYTES);
    }
    u32x4 v;
    memcpy(&v, bytes, sizeof v);
    v = split_pairs(v);
    for (int j = 0; j < 4; j++) memcpy(code_dwords(superblock, column) + j * 64, (uint32_t *)&v + j, 4);
}

/* 16 rows together, since 16 columns fill a cache line of the panel; within them four groups together, since they fill one of
 * the source. So a line of either is in L1 until it is done with, and memory sees 16 ascending streams. */
static void pack_codes(const kt_q4_source *s, size_t first, size_t groups, uint8_t *packed) {
    enum { LINE_GROUPS = 64 / ROW_BYTES };
    const size_t whole = s->k / KT_GROUP, row_bytes = s->k / 2;
    for (size_t block = 0; block < KT_PANEL; block += 16)
        for (size_t line = 0; line < groups; line += LINE_GROUPS)
            for (size_t column = block; column < block + 16; column += 4) {
                const size_t row = first + column, end = line + LINE_GROUPS < groups ? line + LINE_GROUPS : groups;
                const uint8_t *rows[4];
                for (size_t i = 0; i < 4; i++) rows[i] = s->codes + (row + i) * row_bytes;
                for (size_t g = line; g < end; g++) {
                    uint8_t *superblock = packed + g * SUPERBLOCK_BYTES;
                    if (row + 4 <= s->n && g < whole)
                        pack_four(rows, g * ROW_BYTES, superblock, column);
                    else
                        for (size_t i = 0; i < 4; i++) pack_tail(s, row + i, g, superblock, column + i);
                }
            }
}

static kt_q4_scale_range pack_scales(const kt_q4_source *s, size_t first, size_t groups, uint8_t *packed) {
    uint8_t low = 255, high = 0;
    for (size_t column = 0; column < KT_PANEL; column++) {
        uint8_t *to = packed + column;
        if (first + column >= s->n) {
            for (size_t g = 0; g < groups; g++) to[g * SUPERBLOCK_BYTES] = SCALE_ONE;
            continue;
        }
        const uint8_t *from = s->scales + (first + column) * groups;
        for (size_t g = 0; g < groups; g++) to[g * SUPERBLOCK_BYTES] = from[g];
        for (size_t g = 0; g < groups; g++) { /* apart from the copy, so that it vectorises */
            low = from[g] < low ? from[g] : low;
            high = from[g] > high ? from[g] : high;
        }
    }
    return (kt_q4_scale_range){low, high};
}

static kt_q4_scale_range pack_panel(const kt_q4_source *s, size_t panel, uint8_t *packed) {
    const size_t groups = kt_round_up(s->k, KT_GROUP) / KT_GROUP;
    pack_codes(s, panel * KT_PANEL, groups, packed);
    return pack_scales(s, panel * KT_PANEL, groups, packed);
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
        const kt_q4_scale_range r = pack_panel(j->source, panel, j->packed + panel * panel_bytes);
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
