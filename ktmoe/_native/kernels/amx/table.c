/* The kernel table of amx: one row a kernel file. */
#include "kernels/amx/kernels.h"
#include "kernels/rows.h"

static const kt_kernel *const families[] = {kt_q4_amx, kt_q4_folded_amx, kt_q4_groups_amx, kt_b16_amx, NULL};
const kt_rows kt_rows_amx = {.activations = "bf16", .group_bytes = KT_GROUP * sizeof(uint16_t), .tiled = 1};
const kt_rows kt_rows_f32_amx = ROWS_F32;

const kt_isa kt_isa_amx = {
    .abi_version = KT_ABI_VERSION,
    .name = "amx",
    .families = families,
    .enter = kt_enter_amx,
    .leave = kt_leave_amx,
    .activate = kt_activate_amx,
    .exp = kt_exp_amx,
    .read = kt_read_amx,
    .peak = kt_peak_amx,
};
