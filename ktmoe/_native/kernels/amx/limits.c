/* The machine's limits by amx: reading as in limits.h, multiplying with TDPBF16PS. */
#include "kernels/amx/kernels.h"
#include "kernels/amx/tile.h"

#define READ kt_read_amx

#include "kernels/limits.h"

/* Four chains, as kernels have them: enough, since a TDPBF16PS takes 16 cycles and its result 52. */
double kt_peak_amx(size_t iterations) {
    enum { FLOPS = 2 * 16 * 16 * KT_GROUP };
    static const uint32_t ones[] = {0x3F803F80, 0x3F803F80, 0x3F803F80, 0x3F803F80, 0x3F803F80, 0x3F803F80,
                                    0x3F803F80, 0x3F803F80, 0x3F803F80, 0x3F803F80, 0x3F803F80, 0x3F803F80,
                                    0x3F803F80, 0x3F803F80, 0x3F803F80, 0x3F803F80};
    tiles_configure();
    TILE_LOAD(4, ones, 0); /* not zeros, which might cost less power */
    TILE_LOAD(5, ones, 0);
    TILE_LOAD(6, ones, 0);
    TILE_LOAD(7, ones, 0);
    for (size_t i = 0; i < iterations; i++) {
        TILE_DOT(0, 4, 6);
        TILE_DOT(1, 4, 7);
        TILE_DOT(2, 5, 6);
        TILE_DOT(3, 5, 7);
    }
    tiles_release();
    return (double)iterations * 4 * FLOPS;
}
