/* The machine's limits by portable; all of it is in limits.h. */
#include "kernels/portable/kernels.h"

#define READ kt_read_portable
#define PEAK kt_peak_portable

#include "kernels/limits.h"
