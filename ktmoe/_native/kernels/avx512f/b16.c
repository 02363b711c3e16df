/* b16 on avx512f; all of it is in f32_b16.h. */
#include "kernels/avx512f/kernels.h"

#define ROWS kt_rows_avx512f
#define KERNELS kt_b16_avx512f
enum { FEW_MAX = 6 };

#include "kernels/f32_b16.h"
