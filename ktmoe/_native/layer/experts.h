/* The memory of a layer's packed experts: one arena a shard, filled, replaced, and unpacked expert by expert; or mapped from a file
 * that holds such arenas. */
#ifndef KT_EXPERTS_H
#define KT_EXPERTS_H

#include "layer/layer.h"

/* The memory of one shard. Experts lie at arena + expert * expert_bytes until they are replaced. */
typedef struct kt_shard_memory {
    size_t first, count; /* its columns of h */
    size_t expert_bytes, offsets[KT_MATRICES];
    uint8_t *arena;
    size_t arena_bytes;
    uint8_t *spare_map; /* one expert's more, from the first replacement on */
    uint8_t *spare;     /* where the next one goes: what the last one replaced */
} kt_shard_memory;

/* A file whose bytes are the arenas. */
typedef struct kt_arena_file {
    int fd;
    kt_file_state state;             /* as it was mapped; it must stay like that */
    uint64_t offsets[KT_SHARDS_MAX]; /* of each shard's arena, multiples of KT_PAGE_BYTES */
} kt_arena_file;

typedef struct kt_experts {
    kt_layer layer; /* its shards are NULL once the memory was given back */
    size_t intermediate;
    size_t matrices; /* of an expert: KT_MATRICES, or 1: a dense matrix, which is the gate of one expert */
    kt_format formats[KT_MATRICES];
    kt_codebook codebooks[KT_MATRICES];
    kt_shard_memory *memory; /* [shards] */
    kt_scan *scans;          /* [num_experts][KT_MATRICES]: what was seen when they were packed */
    bool mapped;             /* arenas are parts of `file` */
    kt_arena_file file;
    size_t missing; /* matrices that are not packed yet */
} kt_experts;

/* Bytes of an expert of so many matrices in the shard that has columns [m->first, m->first + m->count) of h; fills the offsets,
 * too. */
size_t kt_expert_bytes(const kt_format *formats, size_t matrices, size_t hidden, kt_shard_memory *m);

/* Fills all but the layer's sizes, placement, isa and activation, intermediate, matrices, formats and codebooks, which the caller has set.
 * columns: [shards][2], the first of each shard's columns of h and their number. False: memory was refused; kt_experts_free() gives
 * back what there is. */
bool kt_experts_map(kt_experts *e, const size_t (*columns)[2]);
/* The same, with arenas that are parts of a file, whose descriptor is duplicated. No byte is read. Returns 0, an errno,
 * or KT_FILE_DIFFERS: file->state is not the file's, or the file is too short. */
enum { KT_FILE_DIFFERS = -1 };
int kt_experts_map_file(kt_experts *e, const size_t (*columns)[2], const kt_arena_file *file);
/* Whether what is mapped can be touched: the file is as it was. */
bool kt_experts_intact(const kt_experts *e);
void kt_experts_free(kt_experts *e); /* with the pool's lock held, if others may know of it */

/* A whole matrix in the checkpoint's own bytes. */
typedef struct kt_given {
    const uint8_t *codes, *groups[KT_GROUP_ARRAYS]; /* codes NULL: not given */
    const kt_fields *fields;                        /* of records: packing reads the arrays of groups from them */
    const float *bias;                              /* [n], or NULL */
    const float *factor;                            /* [n] or [1], or NULL */
    bool factor_per_row, divides;
    const kt_kernel *kernels[2]; /* the second where all scales are in [low, high], which fold into the weights */
    uint8_t low, high;
    bool negative; /* whether they may be negative then */
} kt_given;

enum kt_outcome { KT_DONE, KT_CLOSED, KT_INCOMPLETE, KT_REFUSED, KT_TOO_MANY_FORMS, KT_FAILED, KT_FILE_CHANGED };

/* The caller of all functions below holds the pool's lock, which every forward call holds from its beginning to its end.
 *
 * Packs an expert's matrices, [KT_MATRICES]. One that was packed is replaced whole: three matrices, packed aside and then swapped.
 * KT_REFUSED: scans say whose numbers are not finite. KT_FAILED: *error is an errno. What was there stays unless KT_DONE. */
enum kt_outcome kt_experts_pack(kt_experts *e, size_t expert, const kt_given *given, kt_scan *scans, int *error);
/* Takes an expert that lies packed in its arena already, which is a file's. given: all but codes, scales and zero points.
 * scans: what was seen when it was packed. The bytes in the arena are not touched. */
enum kt_outcome kt_experts_install(kt_experts *e, size_t expert, const kt_given *given, kt_scan *scans, int *error);

/* Where one matrix's bias and factor are written: fp32 [n] each. Where all rows share the factor, only its first number is
 * written. */
typedef struct kt_numbers {
    float *bias, *factor; /* NULL: the matrix is not asked for */
    bool has_bias;
} kt_numbers;

/* Fills numbers, [KT_MATRICES], of a packed expert. */
void kt_experts_numbers(const kt_experts *e, size_t expert, kt_numbers *numbers);

/* Fills slices, and numbers, [KT_MATRICES], of the matrices that they are of. */
enum kt_outcome kt_experts_unpack(const kt_experts *e, size_t expert, const kt_slice *slices, size_t count, kt_numbers *numbers,
                                  int *error);

/* Rows of a dense matrix that are asked for by their numbers, [count], each below n; a number may come twice. Where they go, dense:
 * codes and arrays of groups in the order of rows, and factors. Each row has numbers of its own, whatever rows share them. */
typedef struct kt_read_rows {
    const int64_t *numbers;
    size_t count;
    uint8_t *codes, *groups[KT_GROUP_ARRAYS]; /* NULL: the format has no such array */
    float *factors;                           /* NULL: it has no factor */
} kt_read_rows;
enum kt_outcome kt_experts_read_rows(const kt_experts *e, const kt_read_rows *to, int *error);

static inline kt_matrix *kt_matrix_of(const kt_experts *e, size_t shard, size_t expert, size_t matrix) {
    return &e->layer.shards[shard].experts[expert].matrices[matrix];
}

#endif
