/* Memory of the device and pinned memory of the host, both of the host here. None is ever given back to the system, so that a
   copy that works on what was freed is seen. */
#include <stdlib.h>
#include <string.h>

#include "fake.h"

enum { POISON = 0xFF };

struct block {
    char *start;
    size_t bytes;
    bool pinned, freed;
    struct block *next;
};

static struct block *blocks;

static struct block *find(const void *address) {
    const char *at = address;
    struct block *block = blocks;
    while (block && !(block->start <= at && at < block->start + block->bytes)) block = block->next;
    return block;
}

static int allocate(void **out, size_t bytes, bool pinned) {
    struct block *block = malloc(sizeof *block);
    const size_t whole = (bytes + 63) / 64 * 64;
    *block = (struct block){aligned_alloc(64, whole), whole, pinned, false, blocks};
    *out = memset(block->start, POISON, whole);
    blocks = block;
    return SUCCESS;
}

static bool usable(const void *address, size_t bytes, const char *what) {
    const struct block *block = find(address);
    const char *at = address, *wrong = NULL;
    if (!block)
        wrong = "this memory is neither pinned nor the device's";
    else if (block->freed)
        wrong = "this memory was freed";
    else if (at + bytes > block->start + block->bytes)
        wrong = "it goes past the end of the memory";
    if (wrong) fake_violation(wrong, what);
    return !wrong;
}

bool fake_usable(const struct work *work) {
    return usable(work->source, work->bytes, "copy from") && usable(work->target, work->bytes, "copy to");
}

int cudaHostAlloc(void **out, size_t bytes, unsigned flags) {
    (void)flags;
    ENTER;
    error = fake_unsafe();
    LEAVE(error ? error : allocate(out, bytes, true));
}

int cudaFreeHost(void *address) {
    ENTER;
    error = fake_unsafe();
    if (error) LEAVE(error);
    fake_everything_done();
    struct block *block = find(address);
    if (!block || block->start != address || !block->pinned || block->freed) LEAVE(INVALID_VALUE);
    block->freed = true;
    memset(block->start, POISON, block->bytes);
    LEAVE(SUCCESS);
}

/* What an allocator that keeps memory for later does, such as torch's: no call of CUDA, and allowed at any time. Copies that are
   queued already may still work on what is released. */

void *fakeAllocate(size_t bytes) {
    void *out;
    pthread_mutex_lock(&fake_lock);
    allocate(&out, bytes, false);
    pthread_mutex_unlock(&fake_lock);
    return out;
}

void fakeRelease(void *address) {
    pthread_mutex_lock(&fake_lock);
    find(address)->freed = true;
    pthread_mutex_unlock(&fake_lock);
}

uint64_t fakePinned(void) {
    uint64_t count = 0;
    pthread_mutex_lock(&fake_lock);
    for (const struct block *block = blocks; block; block = block->next) count += block->pinned && !block->freed;
    pthread_mutex_unlock(&fake_lock);
    return count;
}
