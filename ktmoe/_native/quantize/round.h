/* Rounding weights: the numbers of groups, and codes from the steps that a rule makes of these. The rules are in Python. */
#ifndef KT_ROUND_H
#define KT_ROUND_H

#include "quantize/weights.h"

enum { KT_E2M1_LIMITS = 7 };

typedef enum kt_rounds_to { KT_TO_INTEGERS, KT_TO_E2M1, KT_TO_E4M3 } kt_rounds_to;
typedef enum kt_ties { KT_TIES_EVEN, KT_TIES_AWAY, KT_TIES_ZERO } kt_ties;

/* How weights become codes.
 *
 * w is multiplied, rounded to float32, divided, rounded to float32: t. sixteenths: then rounded to an integer, ties to even, and
 * divided by 16. float64: t is w / divisor in float64 instead.
 * To integers: t + point, rounded to float32, to the nearest integer by `ties`, from least to most; stored plus `plus`.
 * To E2M1: the code's size is how many of the limits |t| reaches; it is negative where t is below 0, or -0 if zero_signed, unless the
 * size is zero and there is no negative_zero. To E4M3: to the nearest, ties to even, 448 at most.
 * Groups are of rows x columns; arrays of groups are [groups along n, ceil(k / columns)], of the rows that are rounded.
 */
typedef struct kt_rounding {
    kt_rounds_to to;
    kt_ties ties;
    bool sixteenths, float64, negative_zero, zero_signed;
    size_t rows, columns;
    const float *multipliers, *divisors, *points; /* multipliers, points: or NULL */
    const double *values;                         /* what a code's number, less its point, is multiplied by */
    float least, most;
    unsigned code_bits, plus;
    float limits[KT_E2M1_LIMITS];
} kt_rounding;

/* The least and the largest weight of each group. False: a weight is not finite. */
bool kt_weight_extremes(const kt_weights *m, size_t rows, size_t columns, float *restrict low, float *restrict high);

/* Codes of the rows from row on, a multiple of how->rows, into the whole matrix's, in the order of rows, 4-bit ones two a byte.
 * sums: of (w - w')^2 and of w^2 in float64, w' being what stands for w; NULL: nobody asks, which saves a fifth of the time. */
void kt_round_weights(const kt_weights *m, const kt_rounding *how, size_t row, size_t count, uint8_t *restrict codes,
                      double sums[2]);

#endif
