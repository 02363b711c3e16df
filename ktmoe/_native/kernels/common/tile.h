/* AMX instructions. Not the compiler's intrinsics: GCC 12's load of a configuration reads 8 of its 64 bytes as far as the
 * optimiser knows, and its tile loads may be moved before the stores that they depend on.
 *
 * Tiles are named by number, as instructions want them; all have 16 rows of 64 bytes.
 */
#ifndef KT_TILE_H
#define KT_TILE_H

#include <stddef.h>
#include <stdint.h>

#include "sanitizer.h"

enum { TILE_ROW_BYTES = 64, TILE_BYTES = 16 * TILE_ROW_BYTES, QUARTER_BYTES = TILE_BYTES / 4 };

/* The rows of a tile that will be loaded or stored; in a build without AddressSanitizer nothing. */
static inline __attribute__((always_inline)) void tile_touch(void *p, size_t stride, int written) {
    for (size_t row = 0; KT_GAP_BYTES && row < 16; row++)
        (written ? kt_will_write((uint8_t *)p + row * stride, TILE_ROW_BYTES)
                 : kt_will_read((uint8_t *)p + row * stride, TILE_ROW_BYTES));
}

#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t :)
#define TILE_LOAD(t, p, stride)                                                                                         \
    do {                                                                                                                \
        tile_touch((void *)(p), stride, 0);                                                                             \
        __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t : : "r"((const void *)(p)), "r"((size_t)(stride)) : "memory"); \
    } while (0)
#define TILE_STORE(t, p, stride)                                                                                      \
    do {                                                                                                              \
        tile_touch((void *)(p), stride, 1);                                                                           \
        __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" : : "r"((void *)(p)), "r"((size_t)(stride)) : "memory"); \
    } while (0)
/* C += A B: for 16 rows and 16 columns, over 16 k-pairs. */
#define TILE_DOT(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c :)

/* Intel SDM volume 1, table 18-2 (palette 1). */
typedef struct tile_configuration {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_configuration;

static inline void tiles_configure(void) {
    tile_configuration c = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        c.row_bytes[t] = TILE_ROW_BYTES;
        c.rows[t] = 16;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(c));
}

static inline void tiles_release(void) { __asm__ volatile("tilerelease"); }

#endif
