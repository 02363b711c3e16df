/* out[i][k] = sum over n ascending of rows[i][n] * W[n][k], for 64 or 128 columns k of a packed W [n][k].
 *
 * DEFINITION   for KT_PRODUCT_PANELS panels of W after another, 64 n each:
 *                  each one's 64 or 128 columns are decoded and transposed into operands, panels of a matrix without scales
 *                  that kernel's product goes on with them, over these n
 * LAYOUT       panel p, column k of W is at data + p * panel_bytes + k * panel_bytes / K, roughly: what is decoded at once is some KiB,
 *              panel_bytes apart.
 * REGULARITIES a kernel that adds goes on with its sum. Where a weight is two terms, the second ones come after the first ones of
 *              KT_PRODUCT_PANELS panels, as ktmoe/reference/transposed.py (TWO_TERMS_BLOCK) has it.
 */
#include "backward/transposed.h"

#include "backward/rows.h"

enum { LINE_BYTES = 64 };

/* What decode() reads later: 64 columns of a panel. No hardware sees where it goes on. */
static void fetch(const kt_transposed *t, size_t n, size_t panel) {
    const kt_matrix *m = t->matrix;
    const uint8_t *from = m->data + n * m->panel_bytes + panel * KT_PANEL * m->panel_bytes / t->k;
    const size_t bytes = KT_PANEL * m->panel_bytes / t->k;
    for (size_t at = 0; at < bytes; at += LINE_BYTES) __builtin_prefetch(from + at, 0, 2);
}

/* Operands of panels [first, first + count) of `all`. */
static void decode(const kt_back_scratch *s, const kt_transposed *t, size_t first, size_t count, size_t all,
                   size_t panel_bytes) {
    const kt_matrix *m = t->matrix;
    for (size_t n = 0; n < count; n++)
        for (size_t p = 0; p < t->panels; p++) {
            if (first + n + KT_PRODUCT_PANELS < all) fetch(t, first + n + KT_PRODUCT_PANELS, t->panel + p);
            m->kernel->transpose(&(kt_transposing){
                .w = m->data + (first + n) * m->panel_bytes,
                .k = t->k,
                .first = (t->panel + p) * KT_PANEL,
                .scale_group = m->scale_group,
                .codebook = m->codebook,
                .to = {(uint8_t *)s->operand[p][0] + n * panel_bytes, (uint8_t *)s->operand[p][1] + n * panel_bytes},
            });
        }
}

void kt_transposed_product(const kt_back_worker *w, const kt_transposed *t) {
    const kt_back_scratch *s = w->scratch;
    const kt_piece *piece = &w->job->pieces[t->strip->piece];
    const kt_kernel *product = kt_product_of(w->job, t->matrix);
    const kt_rows *rows = product->rows;
    const size_t all = t->rows->k / KT_PANEL, m = t->strip->rows, row = t->strip->first - piece->first;
    const size_t number_bytes = product->family[0] == 'f' ? sizeof(float) : sizeof(uint16_t);
    for (size_t i = 0; i < m; i++) s->rows[i] = kt_row_of(rows, t->rows->base, t->rows->stride_bytes, piece, row + i);
    for (size_t first = 0; first < all; first += KT_PRODUCT_PANELS) {
        const size_t count = kt_columns(all, first, KT_PRODUCT_PANELS);
        decode(s, t, first, count, all, KT_PANEL * KT_PANEL * number_bytes);
        for (int term = 0; term < t->matrix->kernel->terms; term++)
            kt_multiply(
                &(kt_dot){
                    .x = s->rows,
                    .m = m,
                    .k = count * KT_PANEL,
                    .w = {s->operand[0][term], s->operand[1][term]},
                    .panels = t->panels,
                    .out = {*s->out[0], *s->out[1]},
                    .add = t->add || first || term,
                    .scratch = s->kernel,
                },
                product);
        const size_t bytes = count * (KT_PANEL / KT_BLOCK) * rows->block_bytes;
        for (size_t i = 0; i < m; i++)
            s->rows[i] = (const uint8_t *)s->rows[i] + bytes * (rows->tiled ? kt_together(piece, row + i) : 1);
    }
}
