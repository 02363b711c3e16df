/* The kernel table of an instruction set. KT_KERNELS lists the kernel files of its row in isa.py, and the rows whose objects they
 * are: X(q4_f32, avx512f) X(b16_f32, avx512f) ...
 */
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

#define X(source, isa) extern const kt_kernel KT_JOIN(source, isa)[];
KT_KERNELS
#undef X

#define X(source, isa) KT_JOIN(source, isa),
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
    .activate = KT_JOIN(activate, KT_ACTIVATION),
    .derive = KT_JOIN(derive, KT_ACTIVATION),
    .dense = KT_JOIN(dense, KT_DENSE),
    .dense_rows = KT_JOIN(dense_rows, KT_DENSE),
    .widen = KT_JOIN(widen, KT_DENSE),
    .exp = KT_JOIN(exp, KT_ACTIVATION),
    .read = KT_NAME(read),
    .peak = KT_NAME(peak),
};
