"""A row of y has the same bits whatever else is in the batch, however the work is split, and with whom it is computed."""

import itertools
import math

import numpy as np
import pytest
from helpers import B16, BF16, MANY_THREADS, same_bits
from linears import DENSE_KINDS, RowsAlone, random_matrix, random_x
from topology import CPUS

from ktmoe import MXFP4, Linear, LinearGroup, fp8, int4, set_num_threads
from ktmoe._native import core
from ktmoe.machine import threads

POOL = 24
SETTINGS = {
    "scratch_bytes": (256 << 20, 1 << 16, 1),  # all at once, in a few chunks, a row a chunk
    "uneven": (0, 1, 0xDEADBEEF),
    "only_many": (False, True),
    "by_turns": (False, True),
}


def random_settings(rng):
    return {name: values[rng.integers(len(values))] for name, values in SETTINGS.items()}


@pytest.mark.cover("values")
@pytest.mark.parametrize("kind", DENSE_KINDS)
@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=str)
def test_batches(backend, is_emulated, kind, dtype):
    """float32 shows every bit of the sums; bfloat16 is what few rows multiply without a copy. Duplicates of one row have the
    same place in every kernel of every height."""
    rng = np.random.default_rng(1)
    with RowsAlone(random_matrix(rng, 136, 292, bias=True, **DENSE_KINDS[kind]), backend, "auto", dtype=dtype) as rows:
        for count in (2, 5, 13) if is_emulated else (2, 3, 5, 6, 7, 13, 25, core.ROWS_MAX + 8, 512):
            set_num_threads(int(rng.integers(1, MANY_THREADS, endpoint=True)))
            core.tune(**random_settings(rng))
            rows.check(rng.integers(0, POOL, count))
            rows.check(np.full(count, count % POOL))


@pytest.mark.cover("values")
@pytest.mark.parametrize("kind", ["mxfp4", "b16"])
@pytest.mark.parametrize("settings", list(itertools.product(*SETTINGS.values())), ids=str)
def test_every_setting_matters_to_no_bit(backend, kind, settings):
    with RowsAlone(random_matrix(np.random.default_rng(2), 136, 100, **DENSE_KINDS[kind]), backend, "auto") as rows:
        set_num_threads(2)
        core.tune(**dict(zip(SETTINGS, settings, strict=True)))
        rows.check(np.arange(POOL)[::-3])
        rows.check([3])


@pytest.mark.cover("values")
@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 17, 33, 64])
def test_threads(backend, is_emulated, monkeypatch, count):
    """Threads wait without spinning, as always where there are more of them than CPUs."""
    monkeypatch.setenv("KTMOE_SPIN_US", "0")
    with RowsAlone(random_matrix(np.random.default_rng(3), 72 if is_emulated else 328, 100), backend, "auto") as rows:
        set_num_threads(count)
        for batch in ([3], np.arange(POOL), np.arange(200) % POOL)[: 2 if is_emulated else 3]:
            rows.check(batch)


@pytest.mark.cover("values")
@pytest.mark.parametrize("sizes", [(1,), (1, 1), (5, 16, 2), (8, 8, 8, 8)], ids=str)
def test_nodes(backend, fake_nodes, monkeypatch, sizes):
    """Made up, all but node 0's first CPU. No sum goes across shards: the bits are those of one node."""
    monkeypatch.setenv("KTMOE_SPIN_US", "0")
    monkeypatch.setattr(threads, "cgroup_quota", lambda: math.inf)
    numbers = iter(range(2000, 4000))
    cpus = {node: {next(numbers) for _ in range(size)} for node, size in enumerate(sizes)}
    cpus[0] = cpus[0] - {2000} | {CPUS[0]}
    matrix = random_matrix(np.random.default_rng(4), 64 * len(sizes) + 8, 100, bias=True)
    with RowsAlone(matrix, backend, "auto") as rows:
        fake_nodes(cpus, usable=set().union(*cpus.values()))
        with Linear(matrix, backend, "auto", numa_nodes=list(cpus)) as linear:
            assert linear.placement.nodes == tuple(cpus)
            for count, batch in ((1, [2]), (sum(sizes), np.arange(POOL)), (len(sizes) + 1, np.arange(5))):
                set_num_threads(count)
                assert same_bits(linear.forward(rows.x[batch]), rows.alone[batch])


# Groups

#: Formats of a group's matrices, outputs of each.
GROUPS = {
    "q, k, v": [(B16, 192), (B16, 64), (B16, 63)],
    "formats": [(B16, 130), (fp8(), 64), (MXFP4, 72), (int4(32), 8)],
    "one": [(MXFP4, 70)],
}


@pytest.mark.cover("values")
@pytest.mark.parametrize("mode", ["bf16", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("formats", GROUPS)
@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=str)
def test_a_group_has_the_bits_of_its_linears(backend, is_emulated, mode, formats, dtype):
    """Also where these take x in different forms of rows, and by different instruction sets, as modes of blocks do."""
    rng = np.random.default_rng(5)
    linears = [Linear(random_matrix(rng, n, 100, f, bias=True), backend, mode) for f, n in GROUPS[formats]]
    for group in (LinearGroup(linears), LinearGroup(linears[::-1])):
        for tokens in (1, 3) if is_emulated else (0, 1, 3, 6, 40, 200):
            core.tune(**random_settings(rng))
            x = random_x(rng, tokens, 100, dtype)
            for wanted in (None, np.float32):
                for linear, y in zip(group.linears, group.forward(x, dtype=wanted), strict=True):
                    assert same_bits(y, linear.forward(x, dtype=wanted))


@pytest.mark.cover("values")
@pytest.mark.parametrize("kind", ["mxfp4", "fp8", "b16"])
@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=str)
def test_a_group_with_an_x_each(backend, is_emulated, kind, dtype):
    """Columns of x that are not whole blocks of 32, so that one row of x ends within what another one would read."""
    rng = np.random.default_rng(6)
    linears = [Linear(random_matrix(rng, 72, 100, **DENSE_KINDS[kind]), backend, "auto") for _ in range(3)]
    group = LinearGroup(linears, inputs="own")
    for tokens in (1, 3) if is_emulated else (0, 1, 3, 6, 40):
        core.tune(**random_settings(rng))
        x = rng.standard_normal((tokens, 3, 100)).astype(dtype)
        for wanted in (None, np.float32):
            y = group.forward(x, dtype=wanted)
            for i, linear in enumerate(linears):
                assert same_bits(y[:, i], linear.forward(np.ascontiguousarray(x[:, i]), dtype=wanted))
