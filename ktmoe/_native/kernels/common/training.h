/* What an instruction set offers for training, beside its kernels. */
#ifndef KT_TRAINING_H
#define KT_TRAINING_H

#include "kernels/common/isa.h"

void KT_NAME(derive)(const kt_derive *d);
void KT_NAME(dense)(const kt_dense *d);
void KT_NAME(dense_rows)(const kt_dense_rows *d);
void KT_NAME(widen)(const uint16_t *x, float *y, size_t count);

#endif
