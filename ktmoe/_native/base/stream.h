/* Stores past the caches, for what nobody reads soon: such a line need not be read before it is written. */
#ifndef KT_STREAM_H
#define KT_STREAM_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "sanitizer.h"

enum { KT_LINE = 64 };

/* Whole lines, `step` bytes from one to the next, from lines side by side. Both sides begin at multiples of 16. Where a CPU has no
 * such stores, these are stores like others. */
static inline __attribute__((always_inline)) void kt_stream(uint8_t *to, size_t step, const uint8_t *from, size_t lines) {
    for (; lines--; to += step, from += KT_LINE) {
        kt_will_write(to, KT_LINE);
#ifdef __SSE2__
        for (int at = 0; at < KT_LINE; at += 16)
            _mm_stream_si128((__m128i *)(to + at), _mm_load_si128((const __m128i *)(from + at)));
#else
        memcpy(to, from, KT_LINE);
#endif
    }
}

/* Orders the lines before what the caller writes next: it comes before other threads are told that the lines are there. */
static inline void kt_streamed(void) {
#ifdef __SSE2__
    _mm_sfence();
#endif
}

#endif
