#include "base/cpu.h"
#include "quantize/round.h"

enum { LANES = 8 };

/* Widens [*low, *high] to hold count numbers; NaN is never less and never more. */
static void range(const float *restrict w, size_t count, float *restrict low, float *restrict high) {
    float least[LANES], most[LANES];
    for (size_t l = 0; l < LANES; l++) least[l] = *low, most[l] = *high;
    size_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (size_t l = 0; l < LANES; l++) {
            least[l] = w[i + l] < least[l] ? w[i + l] : least[l];
            most[l] = w[i + l] > most[l] ? w[i + l] : most[l];
        }
    for (; i < count; i++) {
        least[0] = w[i] < least[0] ? w[i] : least[0];
        most[0] = w[i] > most[0] ? w[i] : most[0];
    }
    for (size_t l = 0; l < LANES; l++) {
        *low = least[l] < *low ? least[l] : *low;
        *high = most[l] > *high ? most[l] : *high;
    }
}

/* 0 times a number that is not finite is NaN. */
static bool finite(const float w[KT_CHUNK]) {
    float zeros[LANES] = {0};
    for (size_t i = 0; i < KT_CHUNK; i += LANES)
        for (size_t l = 0; l < LANES; l++) zeros[l] += w[i + l] * 0.0f;
    float sum = 0;
    for (size_t l = 0; l < LANES; l++) sum += zeros[l];
    return sum == 0;
}

bool kt_weight_extremes(const kt_weights *m, size_t rows, size_t columns, float *restrict low, float *restrict high) {
    const unsigned state = kt_fp_enter();
    const size_t groups = (m->k + columns - 1) / columns;
    bool good = true;
    for (size_t row = 0; row < m->n; row++) {
        float *lows = low + row / rows * groups, *highs = high + row / rows * groups, w[KT_CHUNK];
        if (row % rows == 0)
            for (size_t group = 0; group < groups; group++) lows[group] = __builtin_inff(), highs[group] = -__builtin_inff();
        for (size_t first = 0; first < m->k; first += KT_CHUNK) {
            const size_t count = m->k - first < KT_CHUNK ? m->k - first : KT_CHUNK;
            kt_weights_read(m, row, first, count, w);
            good &= finite(w);
            size_t group = first / columns, end = (group + 1) * columns - first;
            for (size_t i = 0; i < count; group++, end += columns) {
                const size_t stop = end < count ? end : count;
                range(w + i, stop - i, &lows[group], &highs[group]);
                i = stop;
            }
        }
    }
    kt_fp_leave(state);
    return good;
}
