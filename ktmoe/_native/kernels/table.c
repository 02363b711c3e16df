/* The kernel table of an instruction set. KT_KERNELS lists the kernel files of its row in isa.py: X(q4_f32) X(b16_f32) ... */
#include "kernels/common/training.h"

#ifdef __AMX_TILE__
#include "kernels/common/tile.h"
/* A thread's tiles: configured once for all kernels, which never change it, and released before the thread does other work, so
 * that a thread that sleeps has no 8 KiB of tiles to be saved. */
#define ENTER tiles_configure
#define LEAVE tiles_release
#else
#define ENTER NULL
#define LEAVE NULL
#endif

#define X(source) extern const kt_kernel KT_NAME(source)[];
KT_KERNELS
#undef X

#define X(source) KT_NAME(source),
static const kt_kernel *const kernels[] = {KT_KERNELS NULL};
#undef X

#define TEXT_(name) #name
#define TEXT(name) TEXT_(name)

const kt_isa KT_NAME(isa) = {
    .abi_version = KT_ABI_VERSION,
    .name = TEXT(KT_ISA),
    .kernels = kernels,
    .enter = ENTER,
    .leave = LEAVE,
    .activate = KT_NAME(activate),
    .derive = KT_NAME(derive),
    .dense = KT_NAME(dense),
    .dense_rows = KT_NAME(dense_rows),
    .widen = KT_NAME(widen),
    .exp = KT_NAME(exp),
    .read = KT_NAME(read),
    .peak = KT_NAME(peak),
};
