/* What a CPU would have faulted on: recorded with the instruction's address, so that a test can name it.
 *
 * A list of fixed length without locks, written in signal handlers. Who repeats an error in a loop fills only one entry. */
#include "emulator.h"

#include <dlfcn.h>
#include <string.h>

enum { ERRORS = 64 };

struct error {
    const char *name, *what;
    uintptr_t address;
    int values[3];
    _Atomic uint64_t times; /* 0 = not yet complete */
};

static struct error errors[ERRORS];
static _Atomic size_t used; /* beyond ERRORS: so many were lost */

bool kt_error(const struct kt_insn *insn, const struct kt_frame *frame, const char *what, int a, int b, int c) {
    const struct error new = {
        .name = insn->opcode->name, .what = what, .address = (uintptr_t)frame->general[REG_RIP], .values = {a, b, c}};
    const size_t count = atomic_load(&used);
    for (size_t i = 0; i < count && i < ERRORS; i++) {
        struct error *old = &errors[i];
        if (atomic_load(&old->times) && old->what == what && old->address == new.address &&
            !memcmp(old->values, new.values, sizeof new.values)) {
            atomic_fetch_add(&old->times, 1);
            return false;
        }
    }
    const size_t i = atomic_fetch_add(&used, 1);
    if (i >= ERRORS) return false;
    errors[i].name = new.name;
    errors[i].what = new.what;
    errors[i].address = new.address;
    memcpy(errors[i].values, new.values, sizeof new.values);
    atomic_store(&errors[i].times, 1);
    return false;
}

void kt_errors_reset(void) {
    for (size_t i = 0; i < ERRORS; i++) atomic_store(&errors[i].times, 0);
    atomic_store(&used, 0);
}

/* One error, as Python reads it. Library and symbol may be NULL: dladdr knows exported functions only. */
struct report {
    const char *name, *what, *library, *symbol;
    uintptr_t address, library_start, symbol_start;
    int values[3];
    uint64_t times;
};

/* False past the last one. */
__attribute__((visibility("default"))) bool kt_emulator_error(size_t i, struct report *report) {
    if (i >= ERRORS || !atomic_load(&errors[i].times)) return false;
    Dl_info info;
    if (!dladdr((void *)errors[i].address, &info)) memset(&info, 0, sizeof info);
    *report = (struct report){.name = errors[i].name,
                              .what = errors[i].what,
                              .library = info.dli_fname,
                              .symbol = info.dli_sname,
                              .address = errors[i].address,
                              .library_start = (uintptr_t)info.dli_fbase,
                              .symbol_start = (uintptr_t)info.dli_saddr,
                              .times = atomic_load(&errors[i].times)};
    memcpy(report->values, errors[i].values, sizeof report->values);
    return true;
}

__attribute__((visibility("default"))) size_t kt_emulator_errors_lost(void) {
    const size_t count = atomic_load(&used);
    return count > ERRORS ? count - ERRORS : 0;
}
