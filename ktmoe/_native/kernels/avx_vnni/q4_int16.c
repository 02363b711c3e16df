/* q4 with VPDPWSSD on avx_vnni; all of it is in int16_q4.h. */
#include "kernels/avx_vnni/kernels.h"

#define ROWS kt_rows_int16_avx_vnni
#define KERNELS kt_q4_int16_avx_vnni

#include "kernels/int16_q4.h"
