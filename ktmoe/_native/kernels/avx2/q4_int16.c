/* q4 with VPMADDWD on avx2; all of it is in int16_q4.h. */
#include "kernels/avx2/kernels.h"

#define ROWS kt_rows_int16_avx2
#define KERNELS kt_q4_int16_avx2

#include "kernels/int16_q4.h"
