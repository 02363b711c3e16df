/* All kernel tables of this build. KT_ISAS lists the rows of isa.py that the compiler knows: X(portable) X(avx2) ... */
#include "layer/layer.h"

#define X(isa) extern const kt_isa kt_isa_##isa;
KT_ISAS
#undef X

#define X(isa) &kt_isa_##isa,
const kt_isa *const kt_isas[] = {KT_ISAS NULL};
