/* Rows of int16 on avx_vnni; all of it is in int16_rows.h. */
#include "kernels/avx_vnni/kernels.h"
#include "kernels/int16_rows.h"

void kt_encode_int16_avx_vnni(const uint16_t *restrict x, size_t first, size_t count, size_t k, void *restrict row) {
    encode_int16(x, first, count, k, row);
}
