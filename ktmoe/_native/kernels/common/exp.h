/* The activation's exponential, shared by all instruction sets: exp(t) = 2^n * p(r), n = round(t / ln 2), r = t - n ln 2.
 *
 * p is the degree-6 minimax polynomial of exp on |r| <= ln(2) / 2 with p(0) = 1; with its coefficients in fp32 it errs by less than 2^-25, and the whole is
 * within 2^-22 of exp(t), relatively, for results in fp32's normal range (tests/test_activation.py sweeps it).
 * The argument is clamped to where the result has long been 0 or infinity, so that n fits.
 */
#ifndef KT_EXP_H
#define KT_EXP_H

#define KT_EXP_LOW -104.0f /* exp is below half of the least denormal */
#define KT_EXP_HIGH 89.0f  /* exp is above the largest float */
#define KT_EXP_LOG2E 0x1.715476p+0f
#define KT_EXP_LN2_HIGH 0x1.62e4p-1f /* 15 bits: n * it is exact */
#define KT_EXP_LN2_LOW 0x1.7f7d1cp-20f
#define KT_EXP_C1 1.0f
#define KT_EXP_C2 0x1.fffffcp-2f
#define KT_EXP_C3 0x1.555418p-3f
#define KT_EXP_C4 0x1.555824p-5f
#define KT_EXP_C5 0x1.1267d8p-7f
#define KT_EXP_C6 0x1.6ae6dep-10f

#endif
