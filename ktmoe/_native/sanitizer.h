/* What AddressSanitizer cannot know by itself; nothing in a build without -fsanitize=address.
 *
 * It watches what malloc() gives, and the loads and stores that the compiler makes. Packed weights and scratch memory come from
 * mmap(), so who cuts them into arrays forbids what lies between. Instructions that are neither load nor store to the compiler
 * (with a mask, past the caches, of tiles) come after kt_will_read() or kt_will_write().
 */
#ifndef KT_SANITIZER_H
#define KT_SANITIZER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <string.h>

enum { KT_GAP_BYTES = 256 }; /* behind each array */

static inline void kt_forbid(const void *p, size_t bytes) { __asan_poison_memory_region(p, bytes); }
static inline void kt_permit(const void *p, size_t bytes) { __asan_unpoison_memory_region(p, bytes); }
/* Scratch memory is filled with NaN, so that a number that nobody wrote changes results. */
static inline void kt_spoil(void *p, size_t bytes) { memset(p, 0xFF, bytes); }
static inline void kt_will_read(const void *p, size_t bytes) {
    const volatile uint8_t *wrong = __asan_region_is_poisoned((void *)p, bytes);
    if (wrong) (void)*wrong; /* reports it */
}
static inline void kt_will_write(void *p, size_t bytes) {
    volatile uint8_t *wrong = __asan_region_is_poisoned(p, bytes);
    if (wrong) *wrong = 0;
}
#else
enum { KT_GAP_BYTES = 0 };

static inline void kt_forbid(const void *p, size_t bytes) { (void)p, (void)bytes; }
static inline void kt_permit(const void *p, size_t bytes) { (void)p, (void)bytes; }
static inline void kt_spoil(void *p, size_t bytes) { (void)p, (void)bytes; }
static inline void kt_will_read(const void *p, size_t bytes) { (void)p, (void)bytes; }
static inline void kt_will_write(void *p, size_t bytes) { (void)p, (void)bytes; }
#endif

#endif
