/* Many threads that use one layer, without Python: threads ROUNDS SHARDS SEED. For ThreadSanitizer; it also checks what comes out.
 *
 * Callers compute, each with a mask of its own, while one thread replaces experts and exports them, one changes the number of
 * threads and stops the pool, and two submit captured calls. An expert has one of two versions; a y must be that of one of them.
 * In the end the layer is closed under all of them.
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/numbers.h"
#include "base/pool.h"
#include "captured/queue.h"
#include "kernels/isas.h"
#include "layer/experts.h"

enum { EXPERTS = 4, HIDDEN = 70, INTERMEDIATE = 130, VERSIONS = 2, TOKENS = 9, TOP_K = 2, CALLERS = 2, REPLAYS = 2 };

#define CHECK(condition)                                                      \
    do {                                                                      \
        if (!(condition)) {                                                   \
            fprintf(stderr, "line %d: %s is not so\n", __LINE__, #condition); \
            _Exit(1);                                                         \
        }                                                                     \
    } while (0)

static size_t rounds, seed;
static kt_domain domains[2];
static kt_placement everywhere = {.shards = 1, .num_cpus = 4, .num_domains = 1, .domains = domains, .nodes = {-1}};
static kt_placement nodes = {.shards = 2, .threads = 3, .num_cpus = 4, .num_domains = 2, .domains = domains, .nodes = {-1, -1}};
static kt_experts layer;
static uint16_t weights[VERSIONS][KT_MATRICES][INTERMEDIATE * HIDDEN];
static uint16_t x[HIDDEN];
static float right[VERSIONS][EXPERTS][HIDDEN]; /* y of x, by each expert */
static const kt_kernel *kernel;

static uint64_t next_random(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

/* An expert's version is another one's matrices, too: all that makes experts differ is a factor of their down. */
static enum kt_outcome pack(size_t expert, size_t version) {
    kt_given given[KT_MATRICES] = {0};
    kt_scan scans[KT_MATRICES];
    float factor = (float)(expert + 1);
    int error;
    for (size_t m = 0; m < KT_MATRICES; m++) {
        given[m].codes = (const uint8_t *)weights[version][m];
        given[m].kernels[0] = given[m].kernels[1] = kernel;
    }
    given[2].factor = &factor;
    return kt_experts_pack(&layer, expert, given, scans, &error);
}

static int forward(const int64_t *ids, const float *router, const uint8_t *mask, float *y, size_t tokens) {
    static __thread uint16_t rows[TOKENS * HIDDEN];
    for (size_t t = 0; t < tokens; t++) memcpy(rows + t * HIDDEN, x, sizeof x);
    const kt_batch batch = {.tokens = tokens,
                            .top_k = TOP_K,
                            .x = rows,
                            .dtype = KT_BF16,
                            .ids = ids,
                            .weights = router,
                            .mask = mask,
                            .y = y,
                            .y_dtype = KT_F32};
    return kt_moe_forward(&layer.layer, &batch);
}

static bool is_one_of(const float *y, size_t expert, bool skipped) {
    const float nothing[HIDDEN] = {0};
    if (skipped) return !memcmp(y, nothing, sizeof nothing);
    return !memcmp(y, right[0][expert], sizeof *right[0]) || !memcmp(y, right[1][expert], sizeof *right[1]);
}

/* Each token has one expert, and a slot of none. */
static void *call(void *argument) {
    uint64_t state = seed + (uintptr_t)argument;
    int64_t ids[TOKENS * TOP_K];
    float router[TOKENS * TOP_K], y[TOKENS * HIDDEN];
    uint8_t mask[EXPERTS];
    for (size_t i = 0; i < TOKENS * TOP_K; i++) router[i] = 1;
    for (size_t round = 0; round < rounds; round++) {
        const size_t tokens = 1 + next_random(&state) % TOKENS;
        for (size_t e = 0; e < EXPERTS; e++) mask[e] = next_random(&state) % 8 != 0;
        for (size_t t = 0; t < tokens; t++) {
            ids[t * TOP_K] = (int64_t)(next_random(&state) % EXPERTS);
            ids[t * TOP_K + 1] = -1;
        }
        kt_pool_lock();
        const bool open = layer.layer.shards;
        CHECK(!open || forward(ids, router, mask, y, tokens) == 0);
        kt_pool_unlock();
        for (size_t t = 0; t < tokens && open; t++)
            CHECK(is_one_of(y + t * HIDDEN, (size_t)ids[t * TOP_K], !mask[ids[t * TOP_K]]));
        if (!open) break;
    }
    return NULL;
}

static void *replace(void *argument) {
    uint64_t state = seed + 99;
    static uint16_t codes[HIDDEN * INTERMEDIATE];
    static float bias[INTERMEDIATE], factor[INTERMEDIATE];
    for (size_t round = 0; round < rounds; round++) {
        const size_t expert = next_random(&state) % EXPERTS;
        kt_numbers numbers[KT_MATRICES] = {{.bias = bias, .factor = factor}};
        const kt_slice slice = {.rows = INTERMEDIATE, .columns = HIDDEN, .codes = (uint8_t *)codes};
        int error;
        kt_pool_lock();
        const enum kt_outcome outcome = pack(expert, next_random(&state) % VERSIONS);
        CHECK(outcome == KT_DONE || outcome == KT_CLOSED);
        CHECK(kt_experts_unpack(&layer, expert, &slice, 1, numbers, &error) == outcome);
        kt_pool_unlock();
        CHECK(outcome == KT_CLOSED || !memcmp(codes, weights[0][0], sizeof codes) ||
              !memcmp(codes, weights[1][0], sizeof codes));
    }
    return argument;
}

static void *configure(void *argument) {
    uint64_t state = seed + 7;
    for (size_t round = 0; round < rounds; round++) {
        kt_pool_configure(1 + next_random(&state) % 4, next_random(&state) % 2, next_random(&state) % 2 * 20000, &everywhere);
        CHECK(kt_pool_threads() > 0);
        kt_pool_lock();
        if (next_random(&state) % 8 == 0) kt_pool_stop();
        if (next_random(&state) % 8 == 0) kt_moe_release();
        kt_pool_unlock();
    }
    return argument;
}

/* A call that defers, and one that adds what it deferred; as a stream does, one after the other. */
static void *replay(void *argument) {
    const uint8_t none[EXPERTS] = {0}, all[EXPERTS] = {1, 1, 1, 1};
    int64_t ids[TOP_K] = {0, 1}, slots[3 * TOP_K];
    float router[TOP_K] = {1, 0.5f}, sum[HIDDEN];
    uint16_t y[2][HIDDEN], late[HIDDEN];
    uint8_t on_gpu[EXPERTS], urgent[EXPERTS];
    kt_record first = {
        .experts = &layer,
        .batch = {.tokens = 1,
                  .top_k = TOP_K,
                  .x = x,
                  .dtype = KT_BF16,
                  .ids = ids,
                  .weights = router,
                  .mask = all,
                  .y = y[0],
                  .y_dtype = KT_BF16},
        .on_gpu = none,
        .urgent_slots = 1,
        .late = late,
        .scratch = {slots, slots + TOP_K, slots + 2 * TOP_K, on_gpu, urgent, sum},
    };
    kt_record second = first;
    second.earlier = &first;
    second.late = NULL;
    second.urgent_slots = TOP_K;
    second.batch.y = y[1];
    CHECK(kt_queue_start() == 0);
    for (size_t round = 0; round < rounds; round++) {
        kt_queue_submit(&first);
        kt_queue_await(&first);
        kt_queue_submit(&second);
        kt_queue_await(&second);
        int error;
        kt_queue_take_outcome(&second, &error);
        kt_queue_failures();
    }
    kt_queue_forget(&first);
    kt_queue_forget(&second);
    return argument;
}

static void make(size_t shards) {
    uint64_t state = 1;
    kt_cpus cpus;
    CHECK(kt_os_process_cpus(&cpus));
    for (size_t i = 0; i < 2; i++) domains[i] = (kt_domain){i, 2, cpus, cpus};
    for (size_t i = 0; i < sizeof weights / sizeof ***weights; i++)
        (**weights)[i] = kt_bf16_from_f32((float)(next_random(&state) % 64) / 256 - 0.125f);
    for (size_t i = 0; i < HIDDEN; i++) x[i] = kt_bf16_from_f32((float)(next_random(&state) % 64) / 32 - 1);
    for (const kt_kernel *const *list = kt_isas[0]->kernels; *list; list++)
        for (const kt_kernel *k = *list; k->family; k++)
            if (!strcmp(k->family, "b16") && !strcmp(k->scale, "none")) kernel = k;
    CHECK(kernel);
    kt_pool_configure(3, true, 0, &everywhere);
    layer = (kt_experts){
        .layer = {.num_experts = EXPERTS,
                  .hidden = HIDDEN,
                  .placement = shards > 1 ? &nodes : NULL,
                  .isa = kt_isas[0],
                  .act = {1, 1e30f, 0}},
        .intermediate = INTERMEDIATE,
        .matrices = KT_MATRICES,
    };
    for (size_t m = 0; m < KT_MATRICES; m++) layer.formats[m].packing = &kt_pack_b16;
    const size_t whole[1][2] = {{0, INTERMEDIATE}}, halves[2][2] = {{0, 64}, {64, INTERMEDIATE - 64}};
    kt_pool_lock();
    CHECK(kt_experts_map(&layer, shards > 1 ? halves : whole));
    for (size_t version = 0; version < VERSIONS; version++) {
        for (size_t e = 0; e < EXPERTS; e++) CHECK(pack(e, version) == KT_DONE);
        for (size_t e = 0; e < EXPERTS; e++) {
            const int64_t ids[TOP_K] = {(int64_t)e, -1};
            const float router[TOP_K] = {1, 1};
            const uint8_t all[EXPERTS] = {1, 1, 1, 1};
            CHECK(forward(ids, router, all, right[version][e], 1) == 0);
        }
    }
    kt_pool_unlock();
    CHECK(memcmp(right[0], right[1], sizeof *right));
}

int main(int count, char **words) {
    CHECK(count == 4);
    rounds = strtoul(words[1], NULL, 10);
    seed = strtoul(words[3], NULL, 10);
    make(strtoul(words[2], NULL, 10));
    pthread_t ids[CALLERS + REPLAYS + 2];
    size_t started = 0;
    for (size_t i = 0; i < CALLERS; i++) CHECK(pthread_create(&ids[started++], NULL, call, (void *)(i + 1)) == 0);
    for (size_t i = 0; i < REPLAYS; i++) CHECK(pthread_create(&ids[started++], NULL, replay, NULL) == 0);
    CHECK(pthread_create(&ids[started++], NULL, replace, NULL) == 0);
    CHECK(pthread_create(&ids[started++], NULL, configure, NULL) == 0);
    for (size_t i = 0; i < CALLERS; i++) pthread_join(ids[i], NULL);
    kt_pool_lock();
    kt_experts_free(&layer);
    kt_pool_unlock();
    for (size_t i = CALLERS; i < started; i++) pthread_join(ids[i], NULL);
    kt_queue_close();
    kt_pool_lock();
    kt_pool_stop();
    kt_moe_release();
    kt_pool_unlock();
    return 0;
}
