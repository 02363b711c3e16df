/* q4 on avx512f; all of it is in f32_q4.h. */
#include "kernels/avx512f/kernels.h"

#define ROWS kt_rows_avx512f
#define KERNELS kt_q4_avx512f
enum { FEW_MAX = 6 };

#include "kernels/f32_q4.h"
