/* The settings as they are before anybody changes them. */
#include "forward/tuning.h"

kt_tuning kt_moe_tuning = {.scratch_bytes = (size_t)256 << 20, .reduce_slots = 256};
