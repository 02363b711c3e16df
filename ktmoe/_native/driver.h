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
void kt_os_wait(_Atomic uint32_t *word, uint32_t while_equal);
void kt_os_wake(_Atomic uint32_t *word); /* all waiters */
uint64_t kt_os_nanoseconds(void);
/* Ask, for the whole process, to use AMX's tiles, which make signal frames 8 KiB larger; 0 or the errno of a refusal. */
int kt_os_permit_tiles(void);

/* pool.c: one pool for the process. Callers serialise on its lock; the caller is worker 0. */
typedef void (*kt_task)(void *context, size_t worker, size_t workers);
void kt_pool_lock(void);
void kt_pool_unlock(void);
void kt_pool_configure(size_t threads, uint64_t spin_ns); /* takes effect at the next run */
size_t kt_pool_threads(void);
size_t kt_pool_width(void);                   /* with the lock held: threads that the next run has */
int kt_pool_run(kt_task task, void *context); /* with the lock held; 0, or the errno of a thread that could not start */
void kt_pool_barrier(void);                   /* inside a task: all workers */

/* pack.c: between a checkpoint's bytes and the packed layout. */
typedef struct kt_packing kt_packing;
typedef struct kt_format {
    const kt_packing *packing; /* the family's */
    size_t group;              /* k that share a scale; 0 without scales */
    size_t scale_bytes;        /* of a stored scale: 1, 2; 0 without */
    uint16_t scale_one;        /* its bits for 1, which pads */
    uint8_t zero_code;         /* pads, too: its value is 0 */
} kt_format;
typedef struct kt_source {
    kt_format format;
    const uint8_t *codes;  /* n rows */
    const uint8_t *scales; /* [n][ceil(k / group)] */
    size_t n, k;
} kt_source;
typedef struct kt_scan {
    /* Of one-byte scales; of bf16 scales that are not 0, the least and the greatest exponent field. low > high: none were seen. */
    uint8_t low, high;
    bool refused; /* a scale or a weight is no real number */
} kt_scan;
/* One family's layout. Panels are packed one by one, by any thread; scan is that thread's own and is added to. */
struct kt_packing {
    const char *family;
    size_t (*panel_bytes)(const kt_format *format, size_t k);
    void (*pack)(const kt_source *source, size_t panel, uint8_t *packed, kt_scan *scan);
    void (*unpack)(const kt_format *format, const uint8_t *packed, size_t n, size_t k, size_t panel, uint8_t *codes,
                   uint8_t *scales);
};
extern const kt_packing kt_pack_q4, kt_pack_b16;
const kt_packing *kt_packing_of(const char *family);                  /* NULL: no such family */
int kt_pack(const kt_source *source, uint8_t *packed, kt_scan *scan); /* all panels, by the pool; 0 or an errno */
void kt_unpack(const kt_format *format, const uint8_t *packed, size_t n, size_t k, uint8_t *codes, uint8_t *scales);

/* limits.c: the machine's limits and the pool's latencies, measured with its threads; seconds, or a negative errno. */
double kt_limit_read(void (*read)(const void *, size_t), const uint8_t *p, size_t bytes);
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

typedef struct kt_layer {
    size_t num_experts, hidden, intermediate;
    kt_expert *experts;
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
    size_t scratch_bytes; /* bound of the arena; larger batches are processed in chunks */
    size_t reduce_slots;  /* up to so many (token, expert) slots, down items are (expert, panel); beyond, panels */
    uint32_t uneven;      /* not 0: workers grab pseudo-random runs of items, seeded by this */
    bool only_many;       /* never few() */
} kt_tuning;
extern kt_tuning kt_moe_tuning; /* read under the pool's lock */

size_t kt_round_up(size_t value, size_t multiple);
/* A packed matrix of the layer, down or not, is computed by this kernel. False: that would be too many kinds of rows. */
bool kt_moe_use(kt_layer *layer, kt_matrix *matrix, bool down, const kt_kernel *kernel);
int kt_moe_forward(const kt_layer *layer, const kt_batch *batch); /* with the lock held; 0 or an errno */
size_t kt_moe_scratch_bytes(void);                                /* what the arena holds now */

#endif
