/* The kernel table of avx512_bf16: one row a kernel file. */
#include "kernels/avx512_bf16/kernels.h"

static const kt_kernel *const families[] = {kt_q4_avx512_bf16, kt_b16_avx512_bf16, NULL};
const kt_rows kt_rows_avx512_bf16 = {.activations = "bf16", .group_bytes = KT_GROUP * sizeof(uint16_t)};

const kt_isa kt_isa_avx512_bf16 = {
    .abi_version = KT_ABI_VERSION,
    .name = "avx512_bf16",
    .families = families,
    .activate = kt_activate_avx512_bf16,
    .exp = kt_exp_avx512_bf16,
    .read = kt_read_avx512_bf16,
    .peak = kt_peak_avx512_bf16,
};
