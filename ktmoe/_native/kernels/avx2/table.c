/* The kernel table of avx2: one row a kernel file. */
#include "kernels/avx2/kernels.h"
#include "kernels/int16_rows.h"
#include "kernels/int8_rows.h"
#include "kernels/rows.h"

static const kt_kernel *const families[] = {kt_q4_avx2, kt_b16_avx2, kt_q4_int16_avx2, kt_q4_int8_avx2, NULL};
const kt_rows kt_rows_avx2 = ROWS_F32;
const kt_rows kt_rows_int16_avx2 = ROWS_INT16(kt_encode_int16_avx2);
const kt_rows kt_rows_int8_avx2 = ROWS_INT8(kt_encode_int8_avx2);

const kt_isa kt_isa_avx2 = {
    .abi_version = KT_ABI_VERSION,
    .name = "avx2",
    .families = families,
    .activate = kt_activate_avx2,
    .exp = kt_exp_avx2,
    .read = kt_read_avx2,
    .peak = kt_peak_avx2,
};
