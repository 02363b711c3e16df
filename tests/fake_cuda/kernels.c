/* What the stand-in's device can compute: enough for a small model, and for tests that hold a stream. */
#define _POSIX_C_SOURCE 200809L
#include <string.h>
#include <time.h>

#include "fake.h"

enum { ADD_BF16, NEGATE_BF16, WIDEN_INT32, WIDEN_BF16, NARROW_FLOAT32, DELAY, GATE };

static float widened(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* To the nearest, of two the even one; no NaN comes here but as it is. */
static uint16_t rounded(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return 0x7FC0;
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

static void pause_for(size_t microseconds) {
    const struct timespec time = {microseconds / 1000000, microseconds % 1000000 * 1000};
    nanosleep(&time, NULL);
}

void fake_kernel(const struct work *work) {
    uint16_t *y = work->target;
    const uint16_t *a = work->source, *b = work->other;
    const int32_t *narrow = work->source;
    int64_t *wide = work->target;
    const float *from = work->source;
    float *to = work->target;
    switch (work->kernel) {
        case ADD_BF16:
            for (size_t i = 0; i < work->bytes / 2; i++) y[i] = rounded(widened(a[i]) + widened(b[i]));
            break;
        case NEGATE_BF16:
            for (size_t i = 0; i < work->bytes / 2; i++) y[i] = a[i] ^ 0x8000;
            break;
        case WIDEN_INT32:
            for (size_t i = 0; i < work->bytes / 8; i++) wide[i] = narrow[i];
            break;
        case WIDEN_BF16:
            for (size_t i = 0; i < work->bytes / 4; i++) to[i] = widened(a[i]);
            break;
        case NARROW_FLOAT32:
            for (size_t i = 0; i < work->bytes / 2; i++) y[i] = rounded(from[i]);
            break;
        case DELAY: pause_for(work->bytes); break;
        case GATE: /* until somebody writes another byte than 0 */
            while (!*(const volatile char *)work->source) pause_for(100);
            break;
    }
}
