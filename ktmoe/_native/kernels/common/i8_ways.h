/* What i8's kernels have, after panel.h: one function pair and one row of the table for each way of scaling. Includers define I8_ROWS,
 * the form of rows that they take, and I8_ROWS_SUMS, one that has sums of x, too.
 */
FUNCTIONS(none, NONE)
FUNCTIONS(bf16, BF16)
FUNCTIONS(fp16, FP16)
FUNCTIONS(fp16_minima, FP16 | MINIMA)
FUNCTIONS(super_minima, INT8 | SUPER | MINIMA)
FUNCTIONS(super_halves, INT8 | SUPER | HALVES)

#define I8 .family = "i8", .rows = &KT_FORM(I8_ROWS)
#define I8_MINIMA .family = "i8", .rows = &KT_FORM(I8_ROWS_SUMS), .offset = "minimum"
#define SUPER_SCALED .scale = "int8", .super_scale = "fp16"
#define I8_WAYS                                                                                                              \
    {I8, .scale = "none", SERVED_BY(none)}, {I8, .scale = "bf16", PER_BLOCKS, SERVED_BY(bf16)},                              \
        {I8, .scale = "fp16", PER_BLOCKS, SERVED_BY(fp16)}, {I8_MINIMA, .scale = "fp16", PER_BLOCK, SERVED_BY(fp16_minima)}, \
        {I8_MINIMA, SUPER_SCALED, PER_BLOCK, SERVED_BY(super_minima)}, {                                                     \
        I8, SUPER_SCALED, PER_16, SERVED_BY(super_halves)                                                                    \
    }
