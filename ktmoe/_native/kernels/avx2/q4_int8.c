/* q4 with VPMADDUBSW on avx2; all of it is in int8_q4.h. */
#include "kernels/avx2/kernels.h"

#define ROWS kt_rows_int8_avx2
#define KERNELS kt_q4_int8_avx2

#include "kernels/int8_q4.h"
