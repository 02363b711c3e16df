/* The SIGILL handler: install, emulate, pass on what is not ours. Exported functions are called from Python (__init__.py).
 *
 * One trap costs microseconds, an emulated instruction tens of nanoseconds: the handler carries on with the instructions that
 * follow as long as they are ours too. The handler runs on the interrupted thread's own stack: an alternate stack, such as the
 * one Python's faulthandler sets up, may be too small. A memory operand that faults does so inside the handler, so the
 * process gets its SIGSEGV with the right address, from an emulator function. */
#include "emulator.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

/* Round to nearest even, DAZ, FTZ, all exceptions masked: what the emulated instructions use whatever the caller has set.
 * The caller's MXCSR lies in the frame, and the kernel restores it. */
enum { EMULATION_MXCSR = 0x9FC0 };

static struct sigaction previous;
static _Atomic uint64_t traps;

static unsigned exchange_mxcsr(unsigned value) {
    unsigned old;
    __asm__ volatile("stmxcsr %0" : "=m"(old) : : "memory");
    __asm__ volatile("ldmxcsr %0" : : "m"(value) : "memory");
    return old;
}

/* Does what would have happened without us. */
static void pass_on(int signal, siginfo_t *info, void *context) {
    const bool sent = info->si_code <= 0; /* by kill() and the like, not by an instruction */
    if (previous.sa_handler == SIG_IGN && sent) return;
    if (previous.sa_handler == SIG_DFL || previous.sa_handler == SIG_IGN) { /* the kernel overrides IGN for an instruction */
        sigaction(signal, &(struct sigaction){.sa_handler = SIG_DFL}, NULL);
        if (sent) raise(signal); /* delivered on return; an instruction raises it again by itself */
        return;
    }
    const struct sigaction action = previous;
    if (action.sa_flags & SA_RESETHAND) previous = (struct sigaction){.sa_handler = SIG_DFL};
    pthread_sigmask(SIG_BLOCK, &action.sa_mask, NULL);
    if (action.sa_flags & SA_NODEFER) {
        sigset_t only;
        sigemptyset(&only);
        sigaddset(&only, signal);
        pthread_sigmask(SIG_UNBLOCK, &only, NULL);
    }
    if (action.sa_flags & SA_SIGINFO)
        action.sa_sigaction(signal, info, context);
    else
        action.sa_handler(signal);
}

/* Executes what lies at the frame's RIP as long as it is ours; false if nothing was. */
static bool emulate(void *context) {
    struct kt_frame frame;
    struct kt_insn fresh;
    const struct kt_insn *insn;
    bool any = false;
    if (!kt_frame_open(&frame, context)) return false;
    const unsigned mxcsr = exchange_mxcsr(EMULATION_MXCSR);
    while ((insn = kt_known((const uint8_t *)frame.general[REG_RIP], &fresh)) && (any || !insn->opcode->native) &&
           (!insn->opcode->tiles || kt_tiles_open(&frame))) {
        insn->opcode->execute(insn, &frame);
        frame.general[REG_RIP] += insn->length;
        atomic_fetch_add_explicit(&insn->opcode->executed, 1, memory_order_relaxed);
        any = true;
    }
    kt_tiles_close(&frame);
    exchange_mxcsr(mxcsr);
    return any;
}

static void on_sigill(int signal, siginfo_t *info, void *context) {
    if (info->si_code > 0 && emulate(context))
        atomic_fetch_add_explicit(&traps, 1, memory_order_relaxed);
    else
        pass_on(signal, info, context);
}

static bool is_ours(const struct sigaction *action) {
    return action->sa_flags & SA_SIGINFO && action->sa_sigaction == on_sigill;
}

/* 0, or an errno: ENOTSUP = no AVX-512 here, EALREADY = installed before. */
EXPORT int kt_emulator_install(void) {
    struct sigaction action = {.sa_sigaction = on_sigill, .sa_flags = SA_SIGINFO}, found;
    if (!kt_frame_layout()) return ENOTSUP;
    if (sigaction(SIGILL, NULL, &found)) return errno;
    if (is_ours(&found)) return EALREADY;
    previous = found; /* before the handler can run */
    return sigaction(SIGILL, &action, NULL) ? errno : 0;
}

/* 0, or an errno: EBUSY = somebody put another handler over ours, and taking that away is not our business. */
EXPORT int kt_emulator_uninstall(void) {
    struct sigaction found;
    if (sigaction(SIGILL, NULL, &found)) return errno;
    if (!is_ours(&found)) return EBUSY;
    return sigaction(SIGILL, &previous, NULL) ? errno : 0;
}

/* Name and count of opcode i, and whether the CPU has it; NULL past the last. */
EXPORT const char *kt_emulator_count(size_t i, uint64_t *executed, bool *native) {
    struct kt_opcode *opcode = kt_opcode_at(i);
    if (!opcode) return NULL;
    *executed = atomic_load_explicit(&opcode->executed, memory_order_relaxed);
    *native = opcode->native;
    return opcode->name;
}

EXPORT uint64_t kt_emulator_traps(void) { return atomic_load_explicit(&traps, memory_order_relaxed); }

EXPORT void kt_emulator_reset(void) {
    for (size_t i = 0; kt_opcode_at(i); i++) atomic_store_explicit(&kt_opcode_at(i)->executed, 0, memory_order_relaxed);
    atomic_store_explicit(&traps, 0, memory_order_relaxed);
    kt_errors_reset();
}

/* Name and length of the instruction at the start of code (which must hold KT_MAX_INSN_BYTES), or NULL. */
EXPORT const char *kt_emulator_decode(const uint8_t *code, int *length) {
    struct kt_insn insn;
    if (!kt_decode(code, &insn)) return NULL;
    *length = insn.length;
    return insn.opcode->name;
}

/* For tests of what no kernel can be made to do: emulates on a made-up ucontext_t, without a signal. */
EXPORT bool kt_emulator_emulate(void *context) { return kt_frame_layout() && emulate(context); }
