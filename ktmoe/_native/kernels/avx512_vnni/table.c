/* The kernel table of avx512_vnni, for activation mode int8: one row a kernel file. */
#include "kernels/avx512_vnni/kernels.h"
#include "kernels/int8_rows.h"

static const kt_kernel *const families[] = {kt_q4_int8_avx512_vnni, NULL};
const kt_rows kt_rows_int8_avx512_vnni = ROWS_INT8(kt_encode_int8_avx512_vnni);

const kt_isa kt_isa_avx512_vnni = {
    .abi_version = KT_ABI_VERSION,
    .name = "avx512_vnni",
    .families = families,
    .activate = kt_activate_avx512_vnni,
    .exp = kt_exp_avx512_vnni,
    .read = kt_read_avx512_vnni,
    .peak = kt_peak_avx512_vnni,
};
