/* What adapters add to gradients of a matrix's inputs. */
#ifndef KT_BACKWARD_ADDED_H
#define KT_BACKWARD_ADDED_H

#include "backward/job.h"

/* out += dT A, fp32 [the strip's rows][KT_PANEL], for `columns` of the matrix's k inputs from `first` on. Nothing without an adapter. */
void kt_add_adapter(const kt_back_worker *w, const kt_back_strip *strip, size_t matrix, size_t k, size_t first, size_t columns,
                    float *out);

#endif
