/* The kernel table of plain: one row a kernel file. */
#include "kernels/plain/kernels.h"

static const kt_kernel *const kernels[] = {kt_q4_plain, NULL};

/* Rows as they come: bf16, 64 bytes for 32 of them. */
const kt_rows kt_rows_plain = {.form = "bf16", .block_bytes = KT_BLOCK * sizeof(uint16_t)};

const kt_isa kt_isa_plain = {
    .abi_version = KT_ABI_VERSION,
    .name = "plain",
    .kernels = kernels,
    .activate = kt_activate_plain,
    .exp = kt_exp_plain,
    .read = kt_read_plain,
    .peak = kt_peak_plain,
};
