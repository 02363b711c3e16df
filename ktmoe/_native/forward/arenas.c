/* Scratch memory of a pass, for all layers. */
#include "forward/arenas.h"

size_t kt_arenas_bytes(const kt_arenas *a) {
    size_t bytes = a->common.bytes;
    for (size_t i = 0; i < KT_SHARDS_MAX; i++) bytes += a->of[i].bytes;
    return bytes;
}

static bool resize(kt_arena *a, size_t bytes, int node) {
    kt_os_unmap(a->base, a->bytes);
    a->base = bytes ? kt_os_map_on(node, bytes) : NULL;
    a->bytes = a->base ? bytes : 0;
    return a->base || !bytes;
}

static size_t beyond(const kt_arena *a, size_t bytes) { return bytes > a->bytes ? bytes - a->bytes : 0; }

static void release_shards(kt_arenas *a) {
    for (size_t i = 0; i < KT_SHARDS_MAX; i++) resize(&a->of[i], 0, -1);
}

void kt_arenas_release(kt_arenas *a) {
    resize(&a->common, 0, -1);
    release_shards(a);
}

bool kt_arenas_have(kt_arenas *a, const kt_arena_sizes *sizes) {
    if (a->placement != sizes->placement) release_shards(a); /* theirs is on other nodes */
    a->placement = sizes->placement;
    const size_t held = kt_arenas_bytes(a), shards = kt_shards_of(sizes->placement);
    size_t more = beyond(&a->common, sizes->common), needed = sizes->common;
    for (size_t i = 0; i < shards; i++) {
        more += beyond(&a->of[i], sizes->of[i]);
        needed += sizes->of[i];
    }
    /* Other calls may have needed much of other arenas, or had a larger bound. */
    if (held + more > needed && held + more > sizes->bound) kt_arenas_release(a);
    if (sizes->common > a->common.bytes && !resize(&a->common, sizes->common, -1)) return false;
    for (size_t i = 0; i < shards; i++)
        if (sizes->of[i] > a->of[i].bytes && !resize(&a->of[i], sizes->of[i], kt_node_of(sizes->placement, i))) return false;
    return true;
}
