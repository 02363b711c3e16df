"""Every kernel with so many rows of one expert: from memory, and from a core's cache. Results are asserted, speed is not.

A call is a whole forward call of one expert, whose two phases the kernel dominates; from a cache it contains the call's own
overhead, which the pool suite measures, too. A kernel has two forms: "chosen" is few() or many() as the driver chooses by the
number of rows, "many" is many() where few() would be chosen for some kernels.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace

import pytest

from bench import record
from bench.kernels import kernels, one_expert_each, packed
from ktmoe import measuring
from ktmoe._native import core

ROWS = {"chosen": (1, 2, 4, 8, 16, 96, 192), "many": (1, 4, 12)}
ALL_ROWS = {"chosen": (1, 2, 4, 6, 8, 12, 16, 24, 48, 96, 192), "many": (1, 2, 4, 6, 8, 12, 16)}
ROUNDS = 15
#: A round calls as often as fits into so long, but not more often than that, and measures each limit for so long.
ROUND_SECONDS = 0.003
MOST_CALLS = 64


def pytest_generate_tests(metafunc):
    found = list(kernels())
    metafunc.parametrize("measured", found, ids=[kernel.id for kernel in found], indirect=True, scope="module")
    rows = ALL_ROWS if metafunc.config.getoption("--full") else ROWS
    metafunc.parametrize(("called", "rows"), [(called, m) for called, numbers in rows.items() for m in numbers])


@pytest.fixture(scope="module")
def measured(request):
    with packed(request.param) as subject:
        yield subject


@pytest.fixture
def tuned(called):
    old = core.tune(only_many=called == "many")
    yield
    core.tune(**old)


def test_kernel(benchmark, measured, tuned, called, rows):
    batches = one_expert_each(measured.layer, rows)
    calls = max(1, min(MOST_CALLS, math.floor(ROUND_SECONDS / seconds_of_a_call(measured.layer, batches))))
    measurement = measuring.Rounds(measured.layer, measured.limits, batches, least=ROUND_SECONDS)
    last = {}

    def prepare():
        return ([measurement.prepare(), *itertools.islice(batches, calls - 1)],), {}

    def call(bundle):
        for batch in bundle:
            y = measured.layer.forward(batch.x, batch.ids, batch.weights)
        last.update(batch=batch, y=y)

    benchmark.pedantic(call, setup=prepare, rounds=ROUNDS, warmup_rounds=1)
    result = measurement.finish([seconds / calls for seconds in benchmark.stats.stats.data])
    same_expert = replace(measured.probe, ids=last["batch"].ids[:1])
    check = same_expert.check(measured.layer, **last)
    assert check.error <= 1
    fields = record.forward("kernels", measured.kernel.way, result, last["batch"], check)
    benchmark.extra_info.update(
        fields,
        scales=measured.kernel.scales,
        weights=measured.kernel.weights,
        source=measured.kernel.source,
        called=called,
        rows=rows,
        footprint_of_llc=measured.footprint_of_llc,
    )


def seconds_of_a_call(layer, batches) -> float:
    """Roughly: the best of a few."""
    seconds = []
    for batch in itertools.islice(batches, 4):
        start = time.perf_counter()
        layer.forward(batch.x, batch.ids, batch.weights)
        seconds.append(time.perf_counter() - start)
    return min(seconds)
