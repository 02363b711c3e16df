/* The gated activation on avx512f; all of it is in activation.h. */
#include "kernels/avx512f/kernels.h"

#define ACTIVATE kt_activate_avx512f
#define EXP kt_exp_avx512f

#include "kernels/activation.h"
