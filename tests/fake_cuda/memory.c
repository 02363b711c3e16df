/* Memory of the device and pinned memory of the host, both of the host here. None is ever given back to the system: what was
   freed is poisoned, and a copy that works on it is seen. */
#include <stdlib.h>
#include <string.h>

#include "fake.h"

enum { DEVICE, PINNED, KINDS };
enum { POISON = 0xFF };

struct block {
    char *start;
    size_t bytes;
    int kind;
    bool freed;
    uint64_t uses; /* copies that are queued or under way */
    struct block *next;
};

static struct block *blocks;

static struct block *find(const void *address) {
    const char *at = address;
    struct block *block = blocks;
    while (block && !(block->start <= at && at < block->start + block->bytes)) block = block->next;
    return block;
}

static int allocate(void **out, size_t bytes, int kind) {
    struct block *block = calloc(1, sizeof *block);
    const size_t whole = (bytes + 63) / 64 * 64;
    char *start = aligned_alloc(64, whole ? whole : 64);
    if (!block || !start) return OUT_OF_MEMORY;
    memset(start, POISON, whole);
    *block = (struct block){.start = start, .bytes = whole ? whole : 64, .kind = kind, .next = blocks};
    blocks = block;
    *out = start;
    return SUCCESS;
}

static void poison(struct block *block) {
    if (block->freed && !block->uses) memset(block->start, POISON, block->bytes);
}

static int release(void *address, int kind) {
    struct block *block = find(address);
    if (!block || block->start != address || block->kind != kind || block->freed) return INVALID_VALUE;
    block->freed = true;
    poison(block);
    return SUCCESS;
}

static bool take(const void *address, size_t bytes, const char *what) {
    struct block *block = find(address);
    const char *at = address;
    if (!block)
        fake_violation("this memory is neither pinned nor the device's", what);
    else if (block->freed)
        fake_violation("this memory was freed", what);
    else if (at + bytes > block->start + block->bytes)
        fake_violation("it goes past the end of the memory", what);
    else {
        block->uses++;
        return true;
    }
    return false;
}

static void give(const void *address) {
    struct block *block = find(address);
    block->uses--;
    poison(block);
}

bool fake_use(const struct work *work) {
    if (!take(work->source, work->bytes, "copy from")) return false;
    if (take(work->target, work->bytes, "copy to")) return true;
    give(work->source);
    return false;
}

void fake_unuse(const struct work *work) {
    give(work->source);
    give(work->target);
}

int cudaMalloc(void **out, size_t bytes) {
    ENTER;
    error = fake_unsafe();
    LEAVE(error ? error : allocate(out, bytes, DEVICE));
}

int cudaFree(void *address) {
    ENTER;
    error = fake_unsafe();
    if (!error) fake_everything_done();
    LEAVE(error ? error : release(address, DEVICE));
}

int cudaHostAlloc(void **out, size_t bytes, unsigned flags) {
    (void)flags;
    ENTER;
    error = fake_unsafe();
    LEAVE(error ? error : allocate(out, bytes, PINNED));
}

int cudaFreeHost(void *address) {
    ENTER;
    error = fake_unsafe();
    if (!error) fake_everything_done();
    LEAVE(error ? error : release(address, PINNED));
}

/* What an allocator that keeps memory for later does, such as torch's: no call of CUDA, and allowed at any time. */

int fakeAllocate(void **out, size_t bytes) {
    pthread_mutex_lock(&fake_lock);
    const int error = allocate(out, bytes, DEVICE);
    pthread_mutex_unlock(&fake_lock);
    return error;
}

void fakeRelease(void *address) {
    pthread_mutex_lock(&fake_lock);
    struct block *block = find(address);
    release(address, block->kind);
    pthread_mutex_unlock(&fake_lock);
}

uint64_t fakePinned(void) {
    uint64_t count = 0;
    pthread_mutex_lock(&fake_lock);
    for (const struct block *block = blocks; block; block = block->next) count += block->kind == PINNED && !block->freed;
    pthread_mutex_unlock(&fake_lock);
    return count;
}
