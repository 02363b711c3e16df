/* The gated activation on avx512_bf16; all of it is in activation.h. */
#include "kernels/avx512_bf16/kernels.h"

#define ACTIVATE kt_activate_avx512_bf16
#define EXP kt_exp_avx512_bf16

#include "kernels/activation.h"
