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

#include <string.h>

#include "base/numbers.h"

const kt_kernel *kt_product_for(const kt_isa *isa, const char *family) {
    for (const kt_kernel *const *file = isa->kernels; *file; file++)
        for (const kt_kernel *k = *file; k->family; k++)
            if (!strcmp(k->family, family) && !strcmp(k->scale, "none") && !strcmp(k->rows->form, "bf16")) return k;
    return NULL;
}

kt_products kt_products_of(const kt_isa *isa) {
    kt_products p = {.of = {kt_product_for(isa, "b16"), kt_product_for(isa, "f32")}};
    for (size_t i = 0; i < 2; i++) {
        if (!p.of[i]) continue;
        if (p.of[i]->rows->block_bytes > p.block_bytes) p.block_bytes = p.of[i]->rows->block_bytes;
        if (p.of[i]->scratch_bytes > p.scratch_bytes) p.scratch_bytes = p.of[i]->scratch_bytes;
    }
    return p;
}

kt_product_rows kt_product_rows_carve(const kt_products *products, kt_carver *c, size_t rows, size_t panels) {
    kt_product_rows r = {.k = panels * KT_PANEL, .stride_bytes = kt_row_bytes(products->block_bytes, panels * KT_PANEL)};
    r.base = kt_carve_beyond(c, rows, r.stride_bytes, KT_TILE_ROWS * products->block_bytes);
    return r;
}

kt_product_scratch kt_product_scratch_carve(size_t kernel_bytes, kt_carver *c) {
    const size_t operand = KT_PRODUCT_PANELS * KT_PANEL * KT_PANEL * sizeof(float);
    kt_product_scratch s = {
        .out = {kt_carve(c, KT_ROWS_MAX, sizeof(kt_panel_row)), kt_carve(c, KT_ROWS_MAX, sizeof(kt_panel_row))},
        .rows = kt_carve(c, KT_ROWS_MAX, sizeof *s.rows),
        .kernel = kt_carve(c, kernel_bytes, 1),
    };
    for (size_t i = 0; i < 4; i++) s.operand[i / 2][i % 2] = kt_carve(c, operand, 1);
    return s;
}

/* Of a matrix's operands. */
static const kt_kernel *product_of(const kt_products *products, const kt_matrix *matrix) {
    return products->of[strcmp(matrix->kernel->operand, "f32") == 0];
}

/* Rows of the tile that row i is in. */
static size_t together(const kt_piece *piece, size_t i) {
    return kt_columns(piece->count, i / KT_TILE_ROWS * KT_TILE_ROWS, KT_TILE_ROWS);
}

void kt_product_put(const kt_products *products, const kt_matrix *matrix, const kt_product_rows *rows, const kt_piece *piece,
                    size_t i, size_t first, size_t count, uint16_t *row) {
    const kt_rows *as = product_of(products, matrix)->rows;
    for (size_t c = 0; matrix->factor && c < count; c += KT_PANEL) {
        const float *factor = matrix->factor + (first + c) / KT_PANEL * matrix->factor_step;
        for (size_t n = 0; n < KT_PANEL; n++) {
            const float v = kt_bf16_to_f32(row[c + n]);
            row[c + n] = kt_bf16_from_f32(matrix->divides ? v / factor[n] : v * factor[n]);
        }
    }
    kt_row_put(as, false, row, first, count, rows->k, together(piece, i),
               kt_row_of(as, rows->base, rows->stride_bytes, piece, i));
}

enum { LINE_BYTES = 64 };

/* What decode() reads later: 64 columns of a panel. No hardware sees where it goes on. */
static void fetch(const kt_transposed *t, size_t n, size_t panel) {
    const kt_matrix *m = t->matrix;
    const uint8_t *from = m->data + n * m->panel_bytes + panel * KT_PANEL * m->panel_bytes / t->k;
    const size_t bytes = KT_PANEL * m->panel_bytes / t->k;
    for (size_t at = 0; at < bytes; at += LINE_BYTES) __builtin_prefetch(from + at, 0, 2);
}

/* Operands of panels [first, first + count) of `all`. */
static void decode(const kt_product_scratch *s, const kt_transposed *t, size_t first, size_t count, size_t all,
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

void kt_transposed_product(const kt_product_scratch *s, const kt_transposed *t) {
    const kt_kernel *product = product_of(t->products, t->matrix);
    const kt_rows *rows = product->rows;
    const size_t all = t->rows->k / KT_PANEL;
    const size_t number_bytes = product->family[0] == 'f' ? sizeof(float) : sizeof(uint16_t);
    for (size_t i = 0; i < t->m; i++)
        s->rows[i] = kt_row_of(rows, t->rows->base, t->rows->stride_bytes, t->piece, t->first + i);
    for (size_t first = 0; first < all; first += KT_PRODUCT_PANELS) {
        const size_t count = kt_columns(all, first, KT_PRODUCT_PANELS);
        decode(s, t, first, count, all, KT_PANEL * KT_PANEL * number_bytes);
        for (int term = 0; term < t->matrix->kernel->terms; term++)
            kt_multiply(
                &(kt_dot){
                    .x = s->rows,
                    .m = t->m,
                    .k = count * KT_PANEL,
                    .w = {s->operand[0][term], s->operand[1][term]},
                    .panels = t->panels,
                    .out = {*s->out[0], *s->out[1]},
                    .add = t->add || first || term,
                    .scratch = s->kernel,
                },
                product);
        const size_t bytes = count * (KT_PANEL / KT_BLOCK) * rows->block_bytes;
        for (size_t i = 0; i < t->m; i++)
            s->rows[i] = (const uint8_t *)s->rows[i] + bytes * (rows->tiled ? together(t->piece, t->first + i) : 1);
    }
}
