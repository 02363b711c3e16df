/* What kernels take as rows: every form that this instruction set can make. */
#include "kernels/common/isa.h"
#include "kernels/common/x_sums.h"

#ifdef __AVX2__
#include "kernels/common/int16_rows.h"
#include "kernels/common/int8_rows.h"
#endif

/* Widens bf16 to fp32 once a row, so that kernels broadcast it as it is. */
static void encode_f32(const uint16_t *restrict x, size_t first, size_t count, size_t k, void *restrict row) {
    (void)k;
    uint32_t *to = (uint32_t *)row + first;
    for (size_t i = 0; i < count; i++) to[i] = (uint32_t)x[i] << 16;
}

/* Encodes rows as encode_f32() does, with the sums that minima multiply behind them. */
static void encode_f32_sums(const uint16_t *restrict x, size_t first, size_t count, size_t k, void *restrict row) {
    encode_f32(x, first, count, k, row);
    sum_blocks(x, count, (x_sums *)((float *)row + k) + first / KT_BLOCK);
}

static void encode_bf16_sums(const uint16_t *restrict x, size_t first, size_t count, size_t k, void *restrict row) {
    memcpy((uint16_t *)row + first, x, count * sizeof *x);
    sum_blocks(x, count, (x_sums *)((uint16_t *)row + k) + first / KT_BLOCK);
}

const kt_rows KT_NAME(rows_f32) = {.form = "bf16", .block_bytes = KT_BLOCK * sizeof(float), .encode = encode_f32};
const kt_rows KT_NAME(rows_bf16) = {.form = "bf16", .block_bytes = KT_BLOCK * sizeof(uint16_t)};
const kt_rows KT_NAME(rows_f32_sums) = {
    .form = "bf16", .block_bytes = KT_BLOCK * sizeof(float) + sizeof(x_sums), .encode = encode_f32_sums};
const kt_rows KT_NAME(rows_bf16_sums) = {
    .form = "bf16", .block_bytes = KT_BLOCK * sizeof(uint16_t) + sizeof(x_sums), .encode = encode_bf16_sums};
const kt_rows KT_NAME(rows_bf16_tiles) = {.form = "bf16", .block_bytes = KT_BLOCK * sizeof(uint16_t), .tiled = 1};

#ifdef __AVX2__
const kt_rows KT_NAME(rows_int16) = {
    .form = "int16",
    .block_bytes = KT_BLOCK * sizeof(int16_t) + sizeof(int16_block) + sizeof(int16_halves),
    .encode = encode_int16,
};
const kt_rows KT_NAME(rows_int8) = {
    .form = "int8",
    .block_bytes = KT_BLOCK * sizeof(int8_t) + sizeof(int8_block) + sizeof(int8_halves),
    .encode = encode_int8,
    .encode_e2m1 = encode_int8_e2m1,
};
#endif
