/* The kernel table of avx512f: one row a kernel file. */
#include "kernels/avx512f/kernels.h"
#include "kernels/rows.h"

static const kt_kernel *const families[] = {kt_q4_avx512f, kt_b16_avx512f, NULL};
const kt_rows kt_rows_avx512f = ROWS_F32;

const kt_isa kt_isa_avx512f = {
    .abi_version = KT_ABI_VERSION,
    .name = "avx512f",
    .families = families,
    .activate = kt_activate_avx512f,
    .exp = kt_exp_avx512f,
    .read = kt_read_avx512f,
    .peak = kt_peak_avx512f,
};
