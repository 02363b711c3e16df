/* What int's kernels have, after panel.h: one function pair and one row of the table for each size of codes and way of scaling. Includers
 * define INT_ROWS, the form of rows that they take, and INT_ROWS_SUMS, one that has sums of x, too.
 */
FUNCTIONS(none, NONE | 8 * CODE)
FUNCTIONS(bf16, BF16 | 8 * CODE)
FUNCTIONS(fp16, FP16 | 8 * CODE)
FUNCTIONS(super_halves_6, INT8 | SUPER | HALVES | 6 * CODE)
FUNCTIONS(fp16_5, FP16 | 5 * CODE)
FUNCTIONS(fp16_minima_5, FP16 | MINIMA | 5 * CODE)
FUNCTIONS(super_minima_5, INT8 | SUPER | MINIMA | 5 * CODE)
FUNCTIONS(super_halves_3, INT6 | SUPER | HALVES | 3 * CODE)
FUNCTIONS(super_halves_minima_2, UINT4 | SUPER | HALVES | MINIMA | 2 * CODE)
FUNCTIONS(super_2, SUPER_ALONE | SUPER | 2 * CODE)

#define INT(size) .family = "int", .bits = size, .rows = &KT_FORM(INT_ROWS)
#define INT_MINIMA(size) .family = "int", .bits = size, .rows = &KT_FORM(INT_ROWS_SUMS), .offset = "minimum"
#define SUPER_SCALED(kind) .scale = kind, .super_scale = "fp16"
#define INT_WAYS                                                                                        \
    {INT(8), .scale = "none", SERVED_BY(none)}, {INT(8), .scale = "bf16", PER_BLOCKS, SERVED_BY(bf16)}, \
        {INT(8), .scale = "fp16", PER_BLOCKS, SERVED_BY(fp16)},                                         \
        {INT(6), SUPER_SCALED("int8"), PER_16, SERVED_BY(super_halves_6)},                              \
        {INT(5), .scale = "fp16", PER_BLOCK, SERVED_BY(fp16_5)},                                        \
        {INT_MINIMA(5), .scale = "fp16", PER_BLOCK, SERVED_BY(fp16_minima_5)},                          \
        {INT_MINIMA(5), SUPER_SCALED("int8"), PER_BLOCK, SERVED_BY(super_minima_5)},                    \
        {INT(3), SUPER_SCALED("int6"), PER_16, SERVED_BY(super_halves_3)},                              \
        {INT_MINIMA(2), SUPER_SCALED("uint4"), PER_16, SERVED_BY(super_halves_minima_2)}, {             \
        INT(2), .scale = "fp16", PER_SUPER_GROUP, SERVED_BY(super_2)                                    \
    }
