/* q4 on portable; all of it is in f32_q4.h. */
#include "kernels/portable/kernels.h"

#define ROWS kt_rows_portable
#define KERNELS kt_q4_portable
enum { FEW_MAX = 0 };

#include "kernels/f32_q4.h"
