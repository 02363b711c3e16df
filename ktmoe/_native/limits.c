/* Measures the machine's limits with the pool's own threads: what benchmarks divide by. */
#include "driver.h"

typedef struct limit_job {
    void (*read)(const void *, size_t);
    double (*peak)(size_t);
    const uint8_t *p;
    size_t bytes, iterations;
    _Atomic size_t next;
    _Atomic uint64_t flops;
} limit_job;

static void read_all(void *context, size_t worker, size_t workers) {
    (void)worker, (void)workers;
    enum { RUN = 256 << 10 }; /* bytes at a time: a packed panel's order of magnitude */
    limit_job *j = context;
    for (size_t at; (at = atomic_fetch_add(&j->next, RUN)) < j->bytes;)
        j->read(j->p + at, j->bytes - at < RUN ? j->bytes - at : RUN);
}

static void multiply_all(void *context, size_t worker, size_t workers) {
    (void)worker, (void)workers;
    limit_job *j = context;
    atomic_fetch_add(&j->flops, (uint64_t)j->peak(j->iterations));
}

static double timed(kt_task task, limit_job *j) {
    kt_pool_lock();
    const uint64_t start = kt_os_nanoseconds();
    const int error = kt_pool_run(task, j);
    const uint64_t end = kt_os_nanoseconds();
    kt_pool_unlock();
    return error ? -(double)error : (double)(end - start) * 1e-9;
}

double kt_limit_read(void (*read)(const void *, size_t), const uint8_t *p, size_t bytes) {
    limit_job j = {.read = read, .p = p, .bytes = bytes};
    return timed(read_all, &j);
}

double kt_limit_peak(double (*peak)(size_t), size_t iterations, double *flops) {
    limit_job j = {.peak = peak, .iterations = iterations};
    const double seconds = timed(multiply_all, &j);
    *flops = (double)j.flops;
    return seconds;
}
