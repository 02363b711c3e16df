/* The data of numpy's arrays: a handler as NEP 49 has it. What numpy allocates besides, for iterators and casts, is not refused:
 * numpy 2.4 itself dies of that, or raises SystemError. See failing.h. */
#include <stdint.h>
#include <stdlib.h>

#include "failing.h"

static bool refused(void) { return failing_now(ARRAY, "array") != NOTHING; }

static void *array_malloc(void *context, size_t bytes) {
    (void)context;
    return refused() ? NULL : malloc(bytes ? bytes : 1);
}

static void *array_calloc(void *context, size_t count, size_t bytes) {
    (void)context;
    return refused() ? NULL : calloc(count ? count : 1, bytes ? bytes : 1);
}

static void *array_realloc(void *context, void *p, size_t bytes) {
    (void)context;
    return refused() ? NULL : realloc(p, bytes ? bytes : 1);
}

static void array_free(void *context, void *p, size_t bytes) {
    (void)context, (void)bytes;
    free(p);
}

/* numpy's PyDataMem_Handler. */
const struct {
    char name[127];
    uint8_t version;
    void *context;
    void *(*malloc)(void *, size_t);
    void *(*calloc)(void *, size_t, size_t);
    void *(*realloc)(void *, void *, size_t);
    void (*free)(void *, void *, size_t);
} failing_arrays = {"failing", 1, NULL, array_malloc, array_calloc, array_realloc, array_free};
