/* b16 on avx2; all of it is in f32_b16.h. */
#include "kernels/avx2/kernels.h"

#define ROWS kt_rows_avx2
#define KERNELS kt_b16_avx2
enum { FEW_MAX = 4 };

#include "kernels/f32_b16.h"
