/* The kernel tables of this build; NULL ends them. */
#ifndef KT_ISAS_H
#define KT_ISAS_H

#include "ktmoe.h"

extern const kt_isa *const kt_isas[];

#endif
