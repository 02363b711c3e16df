/* The gated activation on amx; all of it is in activation.h. */
#include "kernels/amx/kernels.h"

#define ACTIVATE kt_activate_amx
#define EXP kt_exp_amx

#include "kernels/activation.h"
