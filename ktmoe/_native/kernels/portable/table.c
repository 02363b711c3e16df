/* The kernel table of portable: one row a kernel file. */
#include "kernels/portable/kernels.h"
#include "kernels/rows.h"

static const kt_kernel *const families[] = {kt_q4_portable, kt_b16_portable, NULL};
const kt_rows kt_rows_portable = ROWS_F32;

const kt_isa kt_isa_portable = {
    .abi_version = KT_ABI_VERSION,
    .name = "portable",
    .families = families,
    .activate = kt_activate_portable,
    .exp = kt_exp_portable,
    .read = kt_read_portable,
    .peak = kt_peak_portable,
};
