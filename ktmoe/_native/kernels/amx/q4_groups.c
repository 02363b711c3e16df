/* q4 whose scales are no part of a bf16 weight: group sums in fp32, which on CPUs with AMX beats VDPBF16PS; see f32_q4.h. */
#include "kernels/amx/kernels.h"

#define ROWS kt_rows_f32_amx
#define KERNELS kt_q4_groups_amx
enum { FEW_MAX = 6 };

#include "kernels/f32_q4.h"
