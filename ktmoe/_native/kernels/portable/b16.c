/* b16 on portable; all of it is in f32_b16.h. */
#include "kernels/portable/kernels.h"

#define ROWS kt_rows_portable
#define KERNELS kt_b16_portable
enum { FEW_MAX = 0 };

#include "kernels/f32_b16.h"
