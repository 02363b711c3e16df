/* q4 on avx2; all of it is in f32_q4.h. */
#include "kernels/avx2/kernels.h"

#define ROWS kt_rows_avx2
#define KERNELS kt_q4_avx2
enum { FEW_MAX = 4 };

#include "kernels/f32_q4.h"
