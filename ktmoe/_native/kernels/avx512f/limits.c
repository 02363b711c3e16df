/* The machine's limits by avx512f; all of it is in limits.h. */
#include "kernels/avx512f/kernels.h"

#define READ kt_read_avx512f
#define PEAK kt_peak_avx512f

#include "kernels/limits.h"
