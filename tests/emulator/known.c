/* Instructions that were decoded before, by address: kernels execute the same few thousand again and again.
 *
 * A place is filled once and never emptied. Code may change meanwhile, so that an instruction's bytes are compared: one by one,
 * since what stands there now may be shorter, and its page may end with it. */
#include "emulator.h"

#include <string.h>

enum { PLACES = 1 << 15, TRIES = 4 };
enum { EMPTY, FILLING, FILLED };

static struct place {
    _Atomic int state;
    const uint8_t *address;
    uint8_t code[KT_MAX_INSN_BYTES];
    struct kt_insn insn;
} places[PLACES];

static bool same_bytes(const struct place *place, const uint8_t *code) {
    for (int i = 0; i < place->insn.length; i++)
        if (place->code[i] != code[i]) return false;
    return true;
}

const struct kt_insn *kt_known(const uint8_t *code, struct kt_insn *fresh) {
    const size_t home = (size_t)((uintptr_t)code * 0x9E3779B97F4A7C15u >> 40);
    struct place *free = NULL;
    for (size_t i = 0; i < TRIES && !free; i++) {
        struct place *place = &places[(home + i) % PLACES];
        const int state = atomic_load_explicit(&place->state, memory_order_acquire);
        if (state == FILLED && place->address == code && same_bytes(place, code)) return &place->insn;
        if (state == EMPTY) free = place;
    }
    if (!kt_decode(code, fresh)) return NULL;
    int empty = EMPTY;
    if (free && atomic_compare_exchange_strong(&free->state, &empty, FILLING)) {
        free->address = code;
        memcpy(free->code, code, (size_t)fresh->length);
        free->insn = *fresh;
        atomic_store_explicit(&free->state, FILLED, memory_order_release);
    }
    return fresh;
}
