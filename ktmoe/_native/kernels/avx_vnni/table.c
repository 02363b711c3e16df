/* The kernel table of avx_vnni, for activation modes int16 and int8: one row a kernel file. */
#include "kernels/avx_vnni/kernels.h"
#include "kernels/int16_rows.h"
#include "kernels/int8_rows.h"

static const kt_kernel *const families[] = {kt_q4_int16_avx_vnni, kt_q4_int8_avx_vnni, NULL};
const kt_rows kt_rows_int16_avx_vnni = ROWS_INT16(kt_encode_int16_avx_vnni);
const kt_rows kt_rows_int8_avx_vnni = ROWS_INT8(kt_encode_int8_avx_vnni);

const kt_isa kt_isa_avx_vnni = {
    .abi_version = KT_ABI_VERSION,
    .name = "avx_vnni",
    .families = families,
    .activate = kt_activate_avx_vnni,
    .exp = kt_exp_avx_vnni,
    .read = kt_read_avx_vnni,
    .peak = kt_peak_avx_vnni,
};
