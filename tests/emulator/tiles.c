/* AMX state of the interrupted thread, kept by the emulator: one struct kt_tiles for each thread that has used AMX.
 *
 * They form a list that only grows. A thread finds its own in a thread-local pointer, and at first takes over that of a thread
 * that has ended, so that there are never more than threads at one time. Memory comes from mmap, as a signal is handled.
 *
 * A CPU that has AMX refuses the instructions on tile data in a process that did not ask for it, but not LDTILECFG,
 * STTILECFG and TILERELEASE: these do not trap, and the configuration is found in the signal frame. To see that LDTILECFG was
 * executed since the last trap, even with the same operand (it zeroes the tiles), the frame's configuration goes back with a
 * start_row that no kernel uses. It is true, nonetheless, for whatever is emulated. */
#include "emulator.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SEEN = 0xE5 };

/* Initial-exec: the library is opened at run time, and the general model would allocate on first use. */
static __thread __attribute__((tls_model("initial-exec"))) struct kt_tiles *mine;

static _Atomic(struct kt_tiles *) all;

static bool has_ended(int thread) { return syscall(SYS_tgkill, getpid(), thread, 0) != 0 && errno == ESRCH; }

static void clear(struct kt_tiles *tiles) {
    memset(tiles->tile, 0, sizeof tiles->tile);
    memset(&tiles->config, 0, sizeof tiles->config);
}

static struct kt_tiles *take(int thread) {
    for (struct kt_tiles *tiles = atomic_load(&all); tiles; tiles = tiles->next) {
        int owner = atomic_load(&tiles->owner); /* this thread's number: a former thread had it, too */
        if ((owner == thread || has_ended(owner)) && atomic_compare_exchange_strong(&tiles->owner, &owner, thread)) {
            clear(tiles);
            return tiles;
        }
    }
    struct kt_tiles *tiles = mmap(NULL, sizeof *tiles, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (tiles == MAP_FAILED) return NULL;
    atomic_store(&tiles->owner, thread);
    tiles->next = atomic_load(&all);
    while (!atomic_compare_exchange_weak(&all, &tiles->next, tiles)) continue;
    return tiles;
}

/* The calling thread's; initial if it is new. After a fork the child's thread counts as new. */
static struct kt_tiles *find(void) {
    const int thread = (int)syscall(SYS_gettid);
    if (!mine || atomic_load(&mine->owner) != thread) {
        const int saved = errno;
        mine = take(thread);
        errno = saved;
    }
    return mine;
}

bool kt_tiles_open(struct kt_frame *frame) {
    if (frame->tiles) return true;
    if (kt_cpu_holds_tile_data(frame)) return false;
    frame->tiles = find();
    if (!frame->tiles || !kt_cpu_holds_tile_config(frame)) return frame->tiles;

    struct kt_tile_config found, known = frame->tiles->config;
    kt_tile_config_read(frame, &found);
    known.start_row = SEEN;
    if (memcmp(&found, &known, sizeof found) != 0) {
        clear(frame->tiles);
        frame->tiles->config = found;
        if (found.start_row == SEEN) frame->tiles->config.start_row = 0; /* of a thread that was forked off */
    }
    return true;
}

void kt_tiles_close(struct kt_frame *frame) {
    if (!frame->tiles || !kt_cpu_holds_tile_config(frame)) return;
    struct kt_tile_config config = frame->tiles->config;
    if (config.palette) config.start_row = SEEN;
    kt_tile_config_write(frame, &config);
}

/* For tests: how many there are. */
__attribute__((visibility("default"))) size_t kt_emulator_tile_states(void) {
    size_t count = 0;
    for (const struct kt_tiles *tiles = atomic_load(&all); tiles; tiles = tiles->next) count++;
    return count;
}
