/* The gated activation on avx_vnni; all of it is in activation.h. */
#include "kernels/avx_vnni/kernels.h"

#define ACTIVATE kt_activate_avx_vnni
#define EXP kt_exp_avx_vnni

#include "kernels/activation.h"
