/* The gated activation on avx2; all of it is in activation.h. */
#include "kernels/avx2/kernels.h"

#define ACTIVATE kt_activate_avx2
#define EXP kt_exp_avx2

#include "kernels/activation.h"
