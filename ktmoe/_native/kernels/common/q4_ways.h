/* What q4's kernels have, after panel.h: one function pair and one row of the table for each way of scaling. Includers define Q4_ROWS,
 * the form of rows that they take, and Q4_ROWS_SUMS, one that has sums of x, too. Sums of blocks are of integers, which need values
 * that have a unit.
 */
FUNCTIONS(none, NONE)
FUNCTIONS(ue8m0, UE8M0)
FUNCTIONS(bf16, BF16)
FUNCTIONS(fp16, FP16)
FUNCTIONS(e4m3, E4M3 | HALVES)
FUNCTIONS(bf16_zero_points, BF16 | ZERO_POINTS)
FUNCTIONS(fp16_zero_points, FP16 | ZERO_POINTS)
FUNCTIONS(fp16_minima, FP16 | MINIMA)
FUNCTIONS(super, INT8 | SUPER)
FUNCTIONS(super_minima, INT8 | SUPER | MINIMA)

#ifndef WHOLE_MAX
#define WHOLE_MAX 0
#endif
#define Q4 .family = "q4", .rows = &KT_FORM(Q4_ROWS), .whole = WHOLE_MAX
#define Q4_MINIMA .family = "q4", .rows = &KT_FORM(Q4_ROWS_SUMS), .whole = WHOLE_MAX, .offset = "minimum"
#define ZEROS .offset = "zero_point"
#define SUPER_SCALED .scale = "int8", .super_scale = "fp16"
#define Q4_WAYS                                                                                                                \
    {Q4, .scale = "none", SERVED_BY(none)}, {Q4, .scale = "ue8m0", PER_BLOCK, SERVED_BY(ue8m0)},                               \
        {Q4, .scale = "bf16", PER_BLOCKS, SERVED_BY(bf16)}, {Q4, .scale = "fp16", PER_BLOCKS, SERVED_BY(fp16)},                \
        {Q4, .scale = "e4m3", PER_16, SERVED_BY(e4m3)}, {Q4, .scale = "bf16", PER_BLOCKS, ZEROS, SERVED_BY(bf16_zero_points)}, \
        {Q4, .scale = "fp16", PER_BLOCKS, ZEROS, SERVED_BY(fp16_zero_points)},                                                 \
        {Q4_MINIMA, .scale = "fp16", PER_BLOCK, SERVED_BY(fp16_minima)}, {Q4, SUPER_SCALED, PER_BLOCK, SERVED_BY(super)}, {    \
        Q4_MINIMA, SUPER_SCALED, PER_BLOCK, SERVED_BY(super_minima)                                                            \
    }
