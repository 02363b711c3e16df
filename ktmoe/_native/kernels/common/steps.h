/* Where the steps of a panel are: blocks of 32 k behind their groups' headers, as pack/layout.h has them. Includers have STEP_BYTES. */
#ifndef KT_STEPS_H
#define KT_STEPS_H

#include "kernels/common/scales.h"

typedef struct steps {
    const uint8_t *packed;
    size_t header_bytes;
    int group_shift; /* of a step, to its group */
} steps;

INLINE steps steps_of(const kt_dot *a, const size_t p, const scaling how) {
    const int one = how & HALVES || kind_of(how) == NONE || kind_of(how) == UE8M0;
    return (steps){a->w[p], header_bytes(how), one ? 0 : __builtin_ctzl(a->scale_group / KT_BLOCK)};
}

/* The header of a step's group. */
INLINE const uint8_t *header_of(const steps *s, const size_t step) {
    return s->packed + (step >> s->group_shift) * (s->header_bytes + ((size_t)STEP_BYTES << s->group_shift));
}

INLINE const uint8_t *step_of(const steps *s, const size_t step) {
    return s->packed + step * STEP_BYTES + ((step >> s->group_shift) + 1) * s->header_bytes;
}

#endif
