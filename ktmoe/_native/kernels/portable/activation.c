/* The gated activation on portable; all of it is in activation.h. */
#include "kernels/portable/kernels.h"

#define ACTIVATE kt_activate_portable
#define EXP kt_exp_portable

#include "kernels/activation.h"
