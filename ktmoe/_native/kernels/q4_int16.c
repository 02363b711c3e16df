/* q4 with VPMADDWD or VPDPWSSD: codes stand for small integers, x for 16-bit ones; see int16.h and panel.h.
 *
 * DEFINITION  for each 32 k, or 16 where these have a scale: sum of (whole + 16) * q, begun at -16 * sum of q, exact in int32;
 *             whole is whole[code], or code - zero point: of size 16 at most;
 *             out = fma(sum * (scale of x * unit), scale, out): sum is exact in fp32, since 32 * 16 * 32640 < 2^24, and
 *             both products are but for fp32's range.
 * LAYOUT      pack/layout.h. The low nibbles of a dword's bytes are k0 k4 k1 k5, the high ones k2 k6 k3 k7: one VPSHUFB looks up
 *             two k-pairs, one of them in the lower, one in the upper bytes of its words. Bytes that are not negative become
 *             words by one instruction.
 */
#define WHOLE_MAX 16
#include "kernels/common/q4_int16.h"
#include "kernels/common/isa.h"

#include "kernels/loops/panel.h"

#define Q4_ROWS rows_int16
#define Q4_ROWS_SUMS rows_int16
#include "kernels/common/q4_ways.h"

const kt_kernel KT_NAME(q4_int16)[] = {
    Q4_WAYS,
    {0},
};
