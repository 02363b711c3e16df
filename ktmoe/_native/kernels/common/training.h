/* What an instruction set offers for training, beside its kernels. */
#ifndef KT_TRAINING_H
#define KT_TRAINING_H

#include "kernels/common/isa.h"

void KT_JOIN(derive, KT_ACTIVATION)(const kt_derive *d);
void KT_JOIN(dense, KT_DENSE)(const kt_dense *d);
void KT_JOIN(dense_rows, KT_DENSE)(const kt_dense_rows *d);
void KT_JOIN(widen, KT_DENSE)(const uint16_t *x, float *y, size_t count);

#endif
