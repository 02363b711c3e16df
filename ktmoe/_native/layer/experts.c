/* SHARDS      A shard has some columns of h: so many rows of gate and up, and so many columns of down; or rows of a dense matrix. Its arena holds its part of
 *             every expert, gate, up and down one after another, in its node's memory, and its own threads pack it; or a file
 *             holds it, and the page cache has what is touched.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/numbers.h"
#include "layer/experts.h"
#include "pack/groups.h"
#include "sanitizer.h"

enum { DOWN = 2 };

static kt_shard_matrix shard_matrix(const kt_format *formats, const kt_shard_memory *m, size_t hidden, size_t matrix) {
    if (matrix == DOWN) return (kt_shard_matrix){.format = &formats[matrix], .column = m->first, .n = hidden, .k = m->count};
    return (kt_shard_matrix){.format = &formats[matrix], .row = m->first, .n = m->count, .k = hidden};
}

size_t kt_expert_bytes(const kt_format *formats, size_t matrices, size_t hidden, kt_shard_memory *m) {
    size_t bytes = 0;
    for (size_t i = 0; i < matrices; i++) {
        const kt_shard_matrix s = shard_matrix(formats, m, hidden, i);
        m->offsets[i] = bytes;
        bytes += kt_packed_bytes(&s);
    }
    return bytes;
}

/* The outputs n and inputs k of a whole matrix, all shards together. */
static size_t n_of(const kt_experts *e, size_t matrix) { return matrix == DOWN ? e->layer.hidden : e->intermediate; }
static size_t k_of(const kt_experts *e, size_t matrix) { return matrix == DOWN ? e->intermediate : e->layer.hidden; }

/* Sets up all but the arenas. gap: bytes behind each matrix. False: there is no memory. */
static bool lay_out(kt_experts *e, const size_t (*columns)[2], size_t gap) {
    const size_t shards = kt_shards_of(e->layer.placement), num_experts = e->layer.num_experts;
    e->missing = e->matrices * num_experts;
    e->layer.shards = calloc(shards, sizeof *e->layer.shards);
    e->memory = calloc(shards, sizeof *e->memory);
    e->scans = calloc(num_experts, KT_MATRICES * sizeof *e->scans);
    if (!e->layer.shards || !e->memory || !e->scans) return false;
    for (size_t s = 0; s < shards; s++) {
        kt_shard_memory *m = &e->memory[s];
        m->first = e->layer.shards[s].first = columns[s][0];
        m->count = e->layer.shards[s].intermediate = columns[s][1];
        m->expert_bytes = kt_expert_bytes(e->formats, e->matrices, e->layer.hidden, m) + e->matrices * gap;
        for (size_t i = 0; i < e->matrices; i++) m->offsets[i] += i * gap;
        m->arena_bytes = num_experts * m->expert_bytes;
        e->layer.shards[s].experts = calloc(num_experts, sizeof(kt_expert));
        if (!e->layer.shards[s].experts) return false;
    }
    return true;
}

bool kt_experts_map(kt_experts *e, const size_t (*columns)[2]) {
    if (!lay_out(e, columns, KT_GAP_BYTES)) return false;
    for (size_t s = 0; s < kt_shards_of(e->layer.placement); s++) {
        kt_shard_memory *m = &e->memory[s];
        if (!(m->arena = kt_os_map_on(kt_node_of(e->layer.placement, s), m->arena_bytes))) return false;
        kt_forbid(m->arena, m->arena_bytes);
    }
    return true;
}

int kt_experts_map_file(kt_experts *e, const size_t (*columns)[2], const kt_arena_file *file) {
    if (!lay_out(e, columns, 0)) return ENOMEM;
    e->file = *file;
    e->file.fd = kt_os_hold(file->fd);
    if (e->file.fd < 0) return errno;
    e->mapped = true;
    if (!kt_experts_intact(e)) return KT_FILE_DIFFERS;
    for (size_t s = 0; s < kt_shards_of(e->layer.placement); s++) {
        kt_shard_memory *m = &e->memory[s];
        const uint64_t from = file->offsets[s];
        if (from > file->state.bytes || file->state.bytes - from < m->arena_bytes) return KT_FILE_DIFFERS;
        if (!(m->arena = kt_os_map_file(e->file.fd, from, m->arena_bytes))) return errno;
        kt_forbid(m->arena, m->arena_bytes);
    }
    return 0;
}

bool kt_experts_intact(const kt_experts *e) {
    kt_file_state now;
    return !e->mapped || (kt_os_file_state(e->file.fd, &now) && !memcmp(&now, &e->file.state, sizeof now));
}

static void free_numbers(const kt_matrix *m) {
    free((void *)m->bias);
    free((void *)m->factor);
}

void kt_experts_free(kt_experts *e) {
    const size_t shards = e->memory && e->layer.shards ? kt_shards_of(e->layer.placement) : 0;
    for (size_t s = 0; s < shards; s++) {
        kt_expert *experts = e->layer.shards[s].experts;
        for (size_t i = 0; experts && i < e->layer.num_experts; i++)
            for (size_t m = 0; m < KT_MATRICES; m++) free_numbers(kt_matrix_of(e, s, i, m));
        (e->mapped ? kt_os_unmap_file : kt_os_unmap)(e->memory[s].arena, e->memory[s].arena_bytes);
        kt_os_unmap(e->memory[s].spare_map, e->memory[s].expert_bytes);
        free(experts);
    }
    if (e->mapped) kt_os_let_go(e->file.fd);
    e->mapped = false;
    free(e->scans);
    free(e->memory);
    free(e->layer.shards);
    e->scans = NULL;
    e->memory = NULL;
    e->layer.shards = NULL;
}

/* Gate and up of one codebook share it, so that one kernel call can take both. */
static const kt_codebook *codebook_of(const kt_experts *e, size_t matrix) {
    const bool alike = !memcmp(&e->codebooks[matrix], &e->codebooks[0], sizeof *e->codebooks);
    return &e->codebooks[alike ? 0 : matrix];
}

/* A copy of a shard's rows of numbers, padded to whole panels with `padding`; KT_PANEL copies where all rows share one. They are
 * checked here and not before, since their owner may change them. *error is ENOMEM, or 0 where KT_REFUSED is returned. */
static enum kt_outcome copy_numbers(const kt_shard_matrix *s, const float *from, bool shared, float padding, const float **copy,
                                    int *error) {
    const size_t count = shared ? KT_PANEL : kt_round_up(s->n, KT_PANEL);
    float *padded = malloc(count * sizeof *padded);
    *copy = padded;
    if (!padded) {
        *error = ENOMEM;
        return KT_FAILED;
    }
    bool finite = true;
    for (size_t i = 0; i < count; i++) {
        padded[i] = shared ? *from : i < s->n ? from[s->row + i] : padding;
        finite &= isfinite(padded[i]);
    }
    return finite ? KT_DONE : KT_REFUSED;
}

/* Down's bias belongs to the first shard; its factor to each. */
static enum kt_outcome copy_bias_and_factor(const kt_shard_matrix *s, const kt_given *g, kt_matrix *to, int *error) {
    if (g->bias && !s->column) {
        const enum kt_outcome outcome = copy_numbers(s, g->bias, false, 0, &to->bias, error);
        if (outcome != KT_DONE) return outcome;
    }
    if (!g->factor) return KT_DONE;
    to->factor_step = g->factor_per_row ? KT_PANEL : 0;
    to->divides = g->divides;
    const enum kt_outcome outcome = copy_numbers(s, g->factor, !g->factor_per_row, 1, &to->factor, error);
    if (outcome != KT_DONE || !g->divides) return outcome;
    for (size_t i = 0; i < (g->factor_per_row ? s->n : 1); i++)
        if (!to->factor[i]) return KT_REFUSED;
    return KT_DONE;
}

/* Where the matrices of an expert are packed to: beside what it has now, if it has. False: memory was refused. */
static bool place(kt_experts *e, size_t expert, bool replaces, size_t shard, kt_shard_matrix *matrices) {
    kt_shard_memory *m = &e->memory[shard];
    if (replaces && !m->spare_map) {
        m->spare_map = m->spare = kt_os_map_on(kt_node_of(e->layer.placement, shard), m->expert_bytes);
        if (!m->spare_map) return false;
        kt_forbid(m->spare, m->expert_bytes);
    }
    uint8_t *to = replaces ? m->spare : m->arena + expert * m->expert_bytes;
    for (size_t i = 0; i < e->matrices; i++) {
        matrices[i].packed = to + m->offsets[i];
        if (matrices[i].format) kt_permit(matrices[i].packed, kt_packed_bytes(&matrices[i]));
    }
    return true;
}

/* An expert's matrices as the forward pass will see them, with biases of their own. */
static enum kt_outcome make(kt_experts *e, const kt_given *given, const kt_shard_matrix *matrices, kt_scan *scans,
                            kt_matrix *fresh, int *error) {
    for (size_t i = 0; i < kt_shards_of(e->layer.placement) * KT_MATRICES; i++) {
        const size_t matrix = i % KT_MATRICES;
        const kt_given *g = &given[matrix];
        const kt_shard_matrix *s = &matrices[i];
        if (!s->format) continue;
        fresh[i] = (kt_matrix){
            .data = s->packed,
            .panel_bytes = kt_panel_bytes(s->format, s->k),
            .scale_group = s->format->groups[KT_SCALES].group,
            .codebook = codebook_of(e, matrix),
        };
        const kt_scan *seen = &scans[matrix];
        const bool folds = g->low <= seen->low && seen->high <= g->high && (g->negative || !seen->negative);
        if (!kt_layer_use(&e->layer, &fresh[i], matrix == DOWN, g->kernels[folds])) return KT_TOO_MANY_FORMS;
        const enum kt_outcome outcome = copy_bias_and_factor(s, g, &fresh[i], error);
        scans[matrix].refused |= outcome == KT_REFUSED;
        if (outcome != KT_DONE) return outcome;
    }
    return KT_DONE;
}

/* Exchanges an expert's matrices with the fresh ones, which become what was there. */
static void swap(kt_experts *e, size_t expert, const kt_shard_matrix *matrices, const kt_scan *scans, kt_matrix *fresh) {
    for (size_t i = 0; i < kt_shards_of(e->layer.placement) * KT_MATRICES; i++) {
        const size_t shard = i / KT_MATRICES, matrix = i % KT_MATRICES;
        if (!matrices[i].format) continue;
        kt_matrix *now = kt_matrix_of(e, shard, expert, matrix), was = *now;
        *now = fresh[i];
        fresh[i] = was;
        if (was.data) e->memory[shard].spare = (uint8_t *)was.data - e->memory[shard].offsets[matrix];
        e->missing -= shard == 0 && !was.data;
        e->scans[expert * KT_MATRICES + matrix] = scans[matrix];
    }
}

/* Matrices that were packed become an expert's. */
static enum kt_outcome install(kt_experts *e, size_t expert, const kt_given *given, const kt_shard_matrix *matrices,
                               kt_scan *scans, int *error) {
    kt_matrix fresh[KT_SHARDS_MAX * KT_MATRICES] = {0};
    const enum kt_outcome outcome = make(e, given, matrices, scans, fresh, error);
    if (outcome == KT_DONE) swap(e, expert, matrices, scans, fresh);
    for (size_t i = 0; i < kt_shards_of(e->layer.placement) * KT_MATRICES; i++) {
        const uint8_t *unused = outcome == KT_DONE ? fresh[i].data : matrices[i].packed;
        if (matrices[i].format && unused) kt_forbid(unused, kt_packed_bytes(&matrices[i]));
        free_numbers(&fresh[i]); /* replaced, or not taken */
    }
    return outcome;
}

enum kt_outcome kt_experts_pack(kt_experts *e, size_t expert, const kt_given *given, kt_scan *scans, int *error) {
    kt_shard_matrix matrices[KT_SHARDS_MAX * KT_MATRICES] = {0};
    size_t count = 0, packed = 0;
    *error = 0;
    if (!e->layer.shards) return KT_CLOSED;
    if (!kt_experts_intact(e)) return KT_FILE_CHANGED; /* what was replaced before is packed into */
    for (size_t i = 0; i < KT_MATRICES; i++) {
        count += given[i].codes != NULL;
        packed += given[i].codes && kt_matrix_of(e, 0, expert, i)->data;
    }
    if (packed && count < e->matrices) return KT_INCOMPLETE;
    const size_t shards = kt_shards_of(e->layer.placement);
    for (size_t s = 0; s < shards; s++) {
        kt_shard_matrix *own = &matrices[s * KT_MATRICES];
        for (size_t i = 0; i < KT_MATRICES; i++) {
            if (!given[i].codes) continue;
            own[i] = shard_matrix(e->formats, &e->memory[s], e->layer.hidden, i);
            own[i].stored = (kt_stored){.codes = given[i].codes, .n = n_of(e, i), .k = k_of(e, i), .fields = given[i].fields};
            memcpy(own[i].stored.groups, given[i].groups, sizeof given[i].groups);
        }
        if (!place(e, expert, packed > 0, s, own)) {
            *error = ENOMEM;
            return KT_FAILED;
        }
    }
    if ((*error = kt_pack(e->layer.placement, matrices, scans))) return KT_FAILED;
    for (size_t i = 0; i < KT_MATRICES; i++)
        if (scans[i].refused) return KT_REFUSED;
    return install(e, expert, given, matrices, scans, error);
}

enum kt_outcome kt_experts_install(kt_experts *e, size_t expert, const kt_given *given, kt_scan *scans, int *error) {
    kt_shard_matrix matrices[KT_SHARDS_MAX * KT_MATRICES] = {0};
    *error = 0;
    if (!e->layer.shards) return KT_CLOSED;
    for (size_t s = 0; s < kt_shards_of(e->layer.placement); s++) {
        kt_shard_matrix *own = &matrices[s * KT_MATRICES];
        for (size_t i = 0; i < e->matrices; i++) own[i] = shard_matrix(e->formats, &e->memory[s], e->layer.hidden, i);
        place(e, expert, false, s, own); /* in the arena, which needs no memory */
    }
    return install(e, expert, given, matrices, scans, error);
}

void kt_experts_numbers(const kt_experts *e, size_t expert, kt_numbers *numbers) {
    for (size_t i = 0; i < kt_shards_of(e->layer.placement) * KT_MATRICES; i++) {
        const size_t shard = i / KT_MATRICES, matrix = i % KT_MATRICES;
        kt_numbers *to = &numbers[matrix];
        if (!to->bias) continue;
        const kt_matrix *from = kt_matrix_of(e, shard, expert, matrix);
        const kt_shard_matrix s = shard_matrix(e->formats, &e->memory[shard], e->layer.hidden, matrix);
        if (from->bias) memcpy(to->bias + s.row, from->bias, s.n * sizeof(float));
        if (from->factor) memcpy(to->factor + s.row, from->factor, (from->factor_step ? s.n : 1) * sizeof(float));
        to->has_bias |= from->bias != NULL;
    }
}

enum kt_outcome kt_experts_unpack(const kt_experts *e, size_t expert, const kt_slice *slices, size_t count, kt_numbers *numbers,
                                  int *error) {
    kt_shard_matrix matrices[KT_SHARDS_MAX * KT_MATRICES] = {0};
    *error = 0;
    if (!e->layer.shards) return KT_CLOSED;
    if (!kt_experts_intact(e)) return KT_FILE_CHANGED;
    for (size_t i = 0; i < kt_shards_of(e->layer.placement) * KT_MATRICES; i++) {
        const size_t shard = i / KT_MATRICES, matrix = i % KT_MATRICES;
        if (!numbers[matrix].bias) continue;
        const kt_matrix *from = kt_matrix_of(e, shard, expert, matrix);
        if (!from->data) return KT_INCOMPLETE;
        matrices[i] = shard_matrix(e->formats, &e->memory[shard], e->layer.hidden, matrix);
        matrices[i].packed = (uint8_t *)from->data;
    }
    kt_experts_numbers(e, expert, numbers);
    *error = kt_unpack(e->layer.placement, matrices, slices, count);
    return *error ? KT_FAILED : KT_DONE;
}
