/* Rows of int16 on avx2; all of it is in int16_rows.h. */
#include "kernels/avx2/kernels.h"
#include "kernels/int16_rows.h"

void kt_encode_int16_avx2(const uint16_t *restrict x, size_t first, size_t count, size_t k, void *restrict row) {
    encode_int16(x, first, count, k, row);
}
