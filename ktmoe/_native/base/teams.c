/* Workers are numbered shard by shard, domain by domain, group by group. */
#include <errno.h>
#include <stdlib.h>

#include "base/teams.h"

typedef struct share {
    size_t cores, threads;
} share;

/* Deals threads in proportion to the cores, by the largest remainders; `least` for each at least. Each thread goes where most
 * is missing. */
static void deal(size_t threads, size_t least, share *shares, size_t count) {
    int64_t cores = 0;
    for (size_t i = 0; i < count; i++) {
        cores += (int64_t)shares[i].cores;
        shares[i].threads = least;
    }
    for (size_t left = threads - least * count; left; left--) {
        share *to = shares;
        int64_t most = INT64_MIN;
        for (share *s = shares; s < shares + count; s++) {
            const int64_t missing = (int64_t)(threads * s->cores) - (int64_t)s->threads * cores;
            if (missing > most) to = s, most = missing;
        }
        to->threads++;
    }
}

/* Cuts a domain's threads, the next workers, into groups of equal size. */
static void add_groups(kt_teams *t, const kt_domain *domain, size_t threads, size_t *worker) {
    const size_t count = (threads + KT_GROUP_MAX - 1) / KT_GROUP_MAX;
    for (size_t i = 0; i < count; i++) {
        const size_t size = threads * (i + 1) / count - threads * i / count;
        const kt_cpus *cpus = threads > domain->cores ? &domain->cpus : &domain->one_a_core;
        t->groups[t->num_groups++] = (kt_group){domain->shard, *worker, size, cpus};
        *worker += size;
    }
}

/* Threads of each domain, by which a worker serves one shard. */
static void deal_to_domains(const kt_placement *p, size_t threads, share *domains) {
    share shards[KT_SHARDS_MAX] = {{0}};
    for (size_t i = 0; i < p->num_domains; i++) {
        domains[i].cores = p->domains[i].cores;
        shards[p->domains[i].shard].cores += domains[i].cores;
    }
    deal(threads, 1, shards, p->shards);
    for (size_t i = 0, end; i < p->num_domains; i = end) {
        const size_t shard = p->domains[i].shard;
        for (end = i; end < p->num_domains && p->domains[end].shard == shard;) end++;
        deal(shards[shard].threads, 0, domains + i, end - i);
    }
}

int kt_teams_make(kt_teams *t, const kt_placement *p, size_t threads) {
    *t = (kt_teams){.workers = threads, .shards = p->shards};
    t->groups = calloc(threads, sizeof *t->groups);
    share *domains = calloc(p->num_domains, sizeof *domains);
    if (!t->groups || !domains) {
        free(domains);
        kt_teams_free(t);
        return ENOMEM;
    }
    const bool enough = threads >= p->shards;
    if (enough) deal_to_domains(p, threads, domains);
    size_t worker = 0;
    for (size_t i = 0; i < p->num_domains; i++) {
        const size_t shard = p->domains[i].shard;
        const bool begins = i == 0 || p->domains[i - 1].shard != shard;
        if (!enough) domains[i].threads = begins && shard < threads; /* worker w is at shard w, and serves w + threads, ... */
        if (begins) t->of[shard] = (kt_team){.first = worker, .first_group = t->num_groups};
        add_groups(t, &p->domains[i], domains[i].threads, &worker);
        t->of[shard].size = worker - t->of[shard].first;
        t->of[shard].num_groups = t->num_groups - t->of[shard].first_group;
    }
    for (size_t shard = threads; shard < p->shards; shard++) t->of[shard] = t->of[shard % threads];
    free(domains);
    return 0;
}

void kt_teams_free(kt_teams *t) {
    free(t->groups);
    *t = (kt_teams){0};
}
