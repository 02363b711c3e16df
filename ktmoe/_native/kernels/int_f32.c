/* Integers in fp32: a code in the mantissa of a float, less a constant, is the integer; see int_values.h, f32.h and panel.h.
 *
 * DEFINITION  w = code - code of 0; for k ascending: sum = x * w + sum, whose product is exact but for fp32's range; for each scale
 *             group: out = fma(sum, scale, out); or one chain where there are no scales
 * LAYOUT      pack/layout.h. A code dword holds 4 k of one column.
 */
#define VECTOR_BY_VECTOR 1
#include "kernels/common/f32.h"
#include "kernels/common/int_values.h"
#include "kernels/common/isa.h"
#include "kernels/common/no_fold.h"

typedef int_base table;

INLINE table load_table(const kt_codebook *book, const scaling how) { return (void)how, int_base_of((float)book->zero); }

INLINE u32v decode(const place *p, const int v, const int k, const scaling how, const table *t, const fold *f) {
    (void)f;
    const int pair = k / 2;
    return (u32v)int_value(load_codes(p, v, half_of(pair), how), byte_of(pair) + k % 2 * 2, t, how);
}

#include "kernels/loops/panel.h"

#define INT_ROWS rows_f32
#define INT_ROWS_SUMS rows_f32_sums
#include "kernels/common/int_ways.h"

FUNCTIONS(panel, PANEL | 8 * CODE)

const kt_kernel KT_NAME(int_f32)[] = {
    INT_WAYS,
    {INT(8), .scale = "panel", PER_BLOCKS, SERVED_BY(panel)},
    {0},
};
