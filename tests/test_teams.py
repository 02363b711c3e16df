"""Which threads serve which shard, for machines that need not exist."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from ktmoe._native.core import Teams
from ktmoe.errors import InputError

GROUP_MAX = 8
#: (cores of the L3 caches of each shard, threads): (shard, workers) of each group.
TABLE = {
    "a small machine": ([[2]], 2, [(0, 2)]),
    "one thread": ([[8, 8]], 1, [(0, 1)]),
    "one large cache": ([[64]], 60, [(0, 7), (0, 8), (0, 7), (0, 8), (0, 7), (0, 8), (0, 7), (0, 8)]),
    "caches of eight": ([[8, 8], [8, 8]], 32, [(0, 8), (0, 8), (1, 8), (1, 8)]),
    "half as many threads": ([[8, 8], [8, 8]], 16, [(0, 4), (0, 4), (1, 4), (1, 4)]),
    "twice as many threads": ([[8], [8]], 32, [(0, 8), (0, 8), (1, 8), (1, 8)]),
    "one more than can be dealt alike": ([[8, 8], [8, 8]], 17, [(0, 5), (0, 4), (1, 4), (1, 4)]),
    "fewer threads than caches": ([[8, 8, 8], [8, 8, 8]], 4, [(0, 1), (0, 1), (1, 1), (1, 1)]),
    "nodes of different size": ([[16], [8]], 12, [(0, 8), (1, 4)]),
    "a small node gets a thread": ([[30], [1], [1]], 4, [(0, 2), (1, 1), (2, 1)]),
    "caches of different size": ([[6, 2]], 4, [(0, 3), (0, 1)]),
    "fewer threads than shards": ([[8], [8], [8]], 2, [(0, 1), (1, 1)]),
}


def machines(rng, count):
    """1 to 8 nodes of 1 to 32 cores each in 1 to 5 L3 caches, with 1 to 256 threads."""
    for _ in range(count):
        shards = []
        for _ in range(rng.integers(1, 8, endpoint=True)):
            cores = int(rng.integers(1, 32, endpoint=True))
            cuts = sorted(rng.choice(np.arange(1, cores), min(cores - 1, int(rng.integers(0, 5))), replace=False).tolist())
            shards.append([last - first for first, last in pairwise([0, *cuts, cores])])
        yield shards, int(rng.choice([rng.integers(1, 9), rng.integers(1, 257)]))


@pytest.mark.parametrize("name", TABLE)
def test_by_hand(name):
    domains, threads, expected = TABLE[name]
    assert [(shard, size) for shard, _, size in Teams(domains, threads).groups] == expected


def test_groups_are_whole_and_equal():
    """Every worker is in one group; groups follow each other by shard, and are of one L3 cache."""
    for domains, threads in machines(np.random.default_rng(1), 300):
        teams = Teams(domains, threads)
        assert (teams.workers, teams.shards) == (threads, len(domains))
        groups = teams.groups
        assert [worker for _, first, size in groups for worker in range(first, first + size)] == list(range(threads))
        assert all(1 <= size <= GROUP_MAX for _, _, size in groups)
        assert groups == sorted(groups)
        if threads >= len(domains):
            for shard, (first, size, first_group, count) in enumerate(teams.of):
                own = groups[first_group : first_group + count]
                assert {of for of, _, _ in own} == {shard}
                assert (own[0][1], sum(size for _, _, size in own)) == (first, size)
                assert [group for group in groups if group[0] == shard] == own


def test_one_worker_serves_several_shards_where_threads_are_few():
    for shards in range(2, 9):
        for threads in range(1, shards):
            teams = Teams([[4, 4]] * shards, threads)
            assert teams.of == [(shard % threads, 1, shard % threads, 1) for shard in range(shards)]
            assert teams.groups == [(worker, worker, 1) for worker in range(threads)]


def largest_remainders(threads, cores):
    """Exactly."""
    quotas = [Fraction(threads * own, sum(cores)) for own in cores]
    dealt = [int(quota) for quota in quotas]
    order = sorted(range(len(cores)), key=lambda i: (dealt[i] - quotas[i], i))
    for i in order[: threads - sum(dealt)]:
        dealt[i] += 1
    return dealt


def test_threads_are_in_proportion_to_cores():
    """Of shards, unless one would get none, and of caches. A cache's threads are in as few groups as may be, of equal size."""
    for domains, threads in machines(np.random.default_rng(2), 300):
        if threads < len(domains):
            continue
        teams = Teams(domains, threads)
        sizes = [size for _, size, _, _ in teams.of]
        dealt = largest_remainders(threads, [sum(own) for own in domains])
        assert min(sizes) >= 1
        if min(dealt) >= 1:
            assert sizes == dealt
        else:  # the others have no more than what is in proportion, rounded up
            most = [max(1, -(-threads * sum(own) // sum(map(sum, domains)))) for own in domains]
            assert all(size <= limit for size, limit in zip(sizes, most, strict=True))
        for shard, own in enumerate(domains):
            groups = [size for of, _, size in teams.groups if of == shard]
            for of_cache in largest_remainders(sizes[shard], own):
                count = -(-of_cache // GROUP_MAX)
                assert sum(groups[:count]) == of_cache
                assert not count or max(groups[:count]) - min(groups[:count]) <= 1
                groups = groups[count:]
            assert not groups


def test_many_threads_on_one_cache():
    """Groups stay small: 32 for 256 threads, and more."""
    for threads in (256, 257, 4096):
        assert len(Teams([[2]], threads).groups) == -(-threads // GROUP_MAX)


@pytest.mark.parametrize(
    ("domains", "threads"), [([], 1), ([[8], []], 2), ([[0]], 1), ([[8]], 0), ([[8]], 4097), ([[1]] * 33, 33)]
)
def test_what_no_machine_has(domains, threads):
    with pytest.raises(InputError):
        Teams(domains, threads)
