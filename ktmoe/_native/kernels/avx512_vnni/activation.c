/* The gated activation on avx512_vnni; all of it is in activation.h. */
#include "kernels/avx512_vnni/kernels.h"

#define ACTIVATE kt_activate_avx512_vnni
#define EXP kt_exp_avx512_vnni

#include "kernels/activation.h"
