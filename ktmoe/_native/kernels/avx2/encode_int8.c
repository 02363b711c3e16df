/* Rows of int8 on avx2, whose sums are of words; all of it is in int8_rows.h. */
#include "kernels/avx2/kernels.h"
#include "kernels/int8_rows.h"

void kt_encode_int8_avx2(const uint16_t *restrict x, size_t first, size_t count, size_t k, void *restrict row) {
    encode_int8(x, first, count, k, row, 1);
}
