/* The machine's limits by avx2; all of it is in limits.h. */
#include "kernels/avx2/kernels.h"

#define READ kt_read_avx2
#define PEAK kt_peak_avx2

#include "kernels/limits.h"
