/* q4 with 8-bit x: codes stand for small integers; see int8.h and panel.h.
 *
 * DEFINITION  for each 32 k, or 16 where these have a scale: sum of whole * q, exact: of (whole + 16) * q, bytes that are not
 *             negative, begun at -16 * sum of q; whole is whole[code], or code - zero point: of size 16 at most;
 *             out = fma(sum * (scale of x * unit), scale, out): sum has 16 bits and the scale of x has 8, so that both products
 *             are exact but for fp32's range
 * LAYOUT      pack/layout.h. The low nibbles of a dword's bytes are k0 k4 k1 k5, the high ones k2 k6 k3 k7, and so are those of x.
 * REGULARITIES VPDPBUSD adds four products to a sum of 32 bits. VPMADDUBSW and VPADDW sum even and odd k in words of 16 k: of a
 *             sum begun at -16 * sum of q, what is added counts whole * q and what is not -16 * q, each at most 16 * 127, so
 *             that it is always within +-32512, of 16 k within half of that. Two products, at most 2 * 32 * 127, never saturate.
 */
#define WHOLE_MAX 16
#include "kernels/common/q4_int8.h"
#include "kernels/common/isa.h"

#include "kernels/loops/panel.h"

#define Q4_ROWS rows_int8
#define Q4_ROWS_SUMS rows_int8
#include "kernels/common/q4_ways.h"

const kt_kernel KT_NAME(q4_int8)[] = {
    Q4_WAYS,
    {0},
};
