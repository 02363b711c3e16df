/* q4 with VPDPBUSD on avx512_vnni; all of it is in int8_q4.h. */
#include "kernels/avx512_vnni/kernels.h"

#define ROWS kt_rows_int8_avx512_vnni
#define KERNELS kt_q4_int8_avx512_vnni

#include "kernels/int8_q4.h"
