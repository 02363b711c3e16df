/* What i8's kernels have, after panel.h: one function pair and one row of the table for each way of scaling. Includers define I8_ROWS,
 * the form of rows that they take.
 */
FUNCTIONS(none, NONE)
FUNCTIONS(bf16, BF16)
FUNCTIONS(fp16, FP16)

#define I8 .family = "i8", .rows = &KT_NAME(I8_ROWS)
#define I8_WAYS                                                                                   \
    {I8, .scale = "none", SERVED_BY(none)}, {I8, .scale = "bf16", PER_BLOCKS, SERVED_BY(bf16)}, { \
        I8, .scale = "fp16", PER_BLOCKS, SERVED_BY(fp16)                                          \
    }
