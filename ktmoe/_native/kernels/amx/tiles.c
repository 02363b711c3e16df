/* A thread's tiles: configured once for all kernels, which never change it, and released before the thread does other work, so
 * that a thread that sleeps has no 8 KiB of tiles to be saved. */
#include "kernels/amx/kernels.h"
#include "kernels/amx/tile.h"

void kt_enter_amx(void) { tiles_configure(); }
void kt_leave_amx(void) { tiles_release(); }
