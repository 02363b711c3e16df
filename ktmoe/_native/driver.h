/* The driver's own interfaces: CPU, operating system, pool, packing, forward. Not for third parties. */
#ifndef KTMOE_DRIVER_H
#define KTMOE_DRIVER_H

#include <stdatomic.h>
#include <stdbool.h>

#include "ktmoe.h"

/* cpu.c: what this CPU and its operating system support. */
typedef struct kt_cpu_feature {
    const char *name; /* as /proc/cpuinfo spells it */
    bool present;
} kt_cpu_feature;
const kt_cpu_feature *kt_cpu_features(size_t *count);
void kt_cpu_relax(void);          /* a spin loop's pause */
unsigned kt_fp_enter(void);       /* IEEE defaults: round to nearest, denormals kept, no traps; returns the old state */
void kt_fp_leave(unsigned state); /* puts it back */

/* os.c: the only file that knows the operating system. */
void *kt_os_map(size_t bytes); /* zeroed, 2 MiB aligned, huge pages asked for; NULL when refused */
void kt_os_unmap(void *p, size_t bytes);
enum { KT_CPU_WORDS = 64 };
typedef struct kt_cpus {
    uint64_t words[KT_CPU_WORDS]; /* a bit for each logical CPU */
} kt_cpus;
/* Keep this thread to these CPUs; *before, unless NULL, gets where it was kept until now. False where the system refuses. */
bool kt_os_bind(const kt_cpus *cpus, kt_cpus *before);
/* Where the process's first thread may run; with the pool's lock held, since a run may keep that thread elsewhere. */
bool kt_os_process_cpus(kt_cpus *cpus);
void kt_os_wait(_Atomic uint32_t *word, uint32_t while_equal);
void kt_os_wake(_Atomic uint32_t *word); /* all waiters */
uint64_t kt_os_nanoseconds(void);
/* Ask, for the whole process, to use AMX's tiles, which make signal frames 8 KiB larger; 0 or the errno of a refusal. */
int kt_os_permit_tiles(void);

/* Where the shards of a layer are. Pointers tell placements apart: one that a run has seen stays as it is for good. */
enum { KT_SHARDS_MAX = 32 };
typedef struct kt_placement {
    size_t shards;
    size_t threads;  /* unless the user chose a number */
    size_t num_cpus; /* of all shards */
    kt_cpus *cpus;   /* [shards]: where each one's threads run */
} kt_placement;

/* Workers are dealt to the shards in turn; where there are fewer, one serves several shards, one after another. */
typedef struct kt_team {
    size_t shard, rank, size; /* rank: of a worker among the size ones of this shard */
} kt_team;
static inline size_t kt_shards_of(const kt_placement *where) { return where ? where->shards : 1; }
static inline kt_team kt_team_of(size_t shard, size_t worker, size_t workers, size_t shards) {
    return (kt_team){shard, worker / shards, workers > shard ? (workers - shard - 1) / shards + 1 : 1};
}

/* pool.c: one pool for the process. Callers serialise on its lock; the caller is worker 0. */
typedef void (*kt_task)(void *context, size_t worker, size_t workers);
void kt_pool_lock(void);
void kt_pool_unlock(void);
/* Take effect at the next run. chosen: the user said how many, so that placements' own numbers do not count. */
void kt_pool_configure(size_t threads, bool chosen, uint64_t spin_ns);
size_t kt_pool_threads(void);
/* With the lock held. where: NULL for threads anywhere. Changing it, or the width, stops the workers and starts others. */
size_t kt_pool_width(const kt_placement *where);                         /* threads that the next run has */
int kt_pool_run(kt_task task, void *context, const kt_placement *where); /* 0, or the errno of a thread that could not start */
void kt_pool_stop(void);                                                 /* ends the idle workers; the next run starts others */
void kt_pool_barrier(kt_team team);                                      /* inside a task: all workers of that team */

/* pack.c: between a checkpoint's bytes and the packed layout. */
typedef struct kt_packing kt_packing;
typedef struct kt_format {
    const kt_packing *packing; /* the family's */
    size_t group;              /* k that share a scale; 0 without scales */
    size_t scale_bytes;        /* of a stored scale: 1, 2; 0 without */
    uint16_t scale_one;        /* its bits for 1, which pads */
    uint8_t zero_code;         /* pads, too: its value is 0 */
} kt_format;
/* A matrix, or a shard's rows or columns of it, in the checkpoint's own bytes. */
typedef struct kt_source {
    const kt_format *format;
    const uint8_t *codes;  /* n rows */
    const uint8_t *scales; /* [n][ceil(k / group)] */
    size_t n, k;
    size_t codes_stride_bytes, scales_stride_bytes; /* from row to row */
} kt_source;
typedef struct kt_scan {
    /* Of one-byte scales; of bf16 scales that are not 0, the least and the greatest exponent field. low > high: none were seen. */
    uint8_t low, high;
    bool refused; /* a scale or a weight is no real number */
} kt_scan;
/* One family's layout. Panels are packed one by one, by any thread; scan is that thread's own and is added to. */
struct kt_packing {
    const char *family;
    size_t code_bits;
    size_t (*panel_bytes)(const kt_format *format, size_t k);
    void (*pack)(const kt_source *source, size_t panel, uint8_t *packed, kt_scan *scan);
    /* The first `rows` of a panel, dense. */
    void (*unpack)(const kt_format *format, const uint8_t *panel, size_t rows, size_t k, uint8_t *codes, uint8_t *scales);
};
extern const kt_packing kt_pack_q4, kt_pack_b16;
const kt_packing *kt_packing_of(const char *family); /* NULL: no such family */

/* What one shard has of one matrix, to be packed or unpacked. */
typedef struct kt_share {
    const kt_format *format;
    uint8_t *packed;
    kt_source source;   /* to pack from */
    size_t row, column; /* of the matrix, where the share begins, */
    size_t n, k;        /* and its size */
} kt_share;
/* A part of a matrix to unpack into, dense; its columns are whole bytes of codes and whole groups. */
typedef struct kt_piece {
    size_t matrix;
    size_t row, rows, column, columns;
    uint8_t *codes, *scales;
} kt_piece;
enum { KT_MATRICES = 3 }; /* of an expert: gate, up, down */
/* With the pool's lock held, by its threads, each shard's by its own; 0 or an errno. shares: [shards][KT_MATRICES], those whose
 * format is NULL are left out. scans: [KT_MATRICES]. */
int kt_pack(const kt_placement *where, const kt_share *shares, kt_scan *scans);
int kt_unpack(const kt_placement *where, const kt_share *shares, const kt_piece *pieces, size_t count);

/* limits.c: the machine's limits and the pool's latencies, measured with its threads; seconds, or a negative errno. */
/* Each shard's threads read so many bytes of its own; with the lock held, since somebody may want to free them. */
double kt_limit_read(void (*read)(const void *, size_t), const kt_placement *where, const uint8_t *const *p,
                     const size_t *bytes);
double kt_limit_peak(double (*peak)(size_t), size_t iterations, double *flops);
/* Latencies: until a run's last worker begins, all having been idle for so long; of a barrier; and the least that any of
 * them can be: of handing one cache line from a worker to another, -EINVAL with fewer than two. Means over count > 0. */
double kt_latency_wake(uint64_t idle_ns);
double kt_latency_barrier(size_t count);
double kt_latency_handoff(size_t count);

/* moe.c: one layer's forward pass. */
typedef struct kt_matrix {
    const uint8_t *data; /* NULL until packed */
    size_t panel_bytes;
    size_t group; /* k that share a scale; 0 without scales */
    const kt_kernel *kernel;
    size_t x_kind; /* of gate and up: which of the layer's x_rows its kernel takes */
    const kt_codebook *codebook;
    const float *bias; /* fp32, padded to whole panels, or NULL */
} kt_matrix;

typedef struct kt_expert {
    kt_matrix gate, up, down;
} kt_expert;

enum kt_router_weight { KT_DOWN_OUTPUT, KT_DOWN_INPUT, KT_EXPERT_INPUT };
enum kt_dtype { KT_BF16, KT_F32 };

enum { KT_X_KINDS = 4 };

/* What one node has of a layer: some of the intermediate dimension of every expert. */
typedef struct kt_shard {
    size_t intermediate;
    kt_expert *experts; /* [num_experts] */
} kt_shard;

typedef struct kt_layer {
    size_t num_experts, hidden;
    const kt_placement *where; /* NULL: one shard, threads anywhere */
    kt_shard *shards;          /* [kt_shards_of(where)]; their outputs are added in this order */
    kt_activation act;
    const kt_isa *isa;
    enum kt_router_weight router_weight;
    const kt_rows *x_rows[KT_X_KINDS]; /* what the kernels of gate and up take, each once; NULL beyond */
    size_t h_group_bytes;              /* the most that any kernel of down takes for KT_GROUP */
    size_t kernel_scratch_bytes;       /* the most that any of its kernels asks for */
} kt_layer;

typedef struct kt_batch {
    size_t tokens, top_k;
    const void *x; /* [tokens][hidden] */
    enum kt_dtype dtype;
    const int64_t *ids;   /* [tokens][top_k] */
    const float *weights; /* [tokens][top_k] */
    const uint8_t *mask;  /* [num_experts], 0 = skip; read once */
    void *y;              /* [tokens][hidden], same dtype as x */
} kt_batch;

/* Settings that change speed and never a bit of the result. Tests force them. */
typedef struct kt_tuning {
    size_t scratch_bytes; /* bound of the arenas; larger batches are processed in chunks */
    size_t reduce_slots;  /* up to so many (token, expert) slots, down items are (expert, panel); beyond, panels */
    uint32_t uneven;      /* not 0: workers grab pseudo-random runs of items, seeded by this */
    bool only_many;       /* never few() */
} kt_tuning;
extern kt_tuning kt_moe_tuning; /* read under the pool's lock */

size_t kt_round_up(size_t value, size_t multiple);
/* A packed matrix of the layer, down or not, is computed by this kernel. False: that would be too many kinds of rows. */
bool kt_moe_use(kt_layer *layer, kt_matrix *matrix, bool down, const kt_kernel *kernel);
int kt_moe_forward(const kt_layer *layer, const kt_batch *batch); /* with the lock held; 0 or an errno */
size_t kt_moe_scratch_bytes(void);                                /* what the arenas hold now; with the lock held */
void kt_moe_release(void);                                        /* gives them back; the next call makes others */

#endif
