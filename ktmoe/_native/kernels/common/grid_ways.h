/* What kernels of records have, after panel.h: one function pair and one row of the table for each way of scaling. Includers define
 * GRID_ROWS, the form of rows that they take.
 */
FUNCTIONS(blocks, INT8 | SUPER)
FUNCTIONS(halves, INT8 | SUPER | HALVES)
FUNCTIONS(digits, SUPER_ALONE | SUPER)

#ifndef WHOLE_MAX
#define WHOLE_MAX 0
#endif
#define OF_RECORDS(name) .family = name, .rows = &KT_FORM(GRID_ROWS), .whole = WHOLE_MAX
#define GRID OF_RECORDS("grid"), .scale = "odd", .super_scale = "fp16"
#define GRID_WAYS                                                                  \
    {GRID, PER_BLOCK, SERVED_BY(blocks)}, {GRID, PER_16, SERVED_BY(halves)}, {     \
        OF_RECORDS("ternary"), .scale = "fp16", PER_SUPER_GROUP, SERVED_BY(digits) \
    }
