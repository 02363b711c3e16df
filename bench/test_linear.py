"""Single dense matrices, and groups, as models have them: ktmoe.Linear and LinearGroup. Results are asserted, speed is not.

Weights come from memory: copies of a call's matrices take turns. bench.linear has the same calls beside torch and ggml.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

import ktmoe
from bench import footprints, record
from bench.linear.calls import Call, calls
from bench.linear.rounds import LinearRounds
from bench.linear.sample import sample
from bench.peers.workers.dispatches import Copies, inputs, outputs
from bench.peers.workers.meters import Meters
from ktmoe.matrix import Matrix

ROWS = (1, 4, 16, 192, 512, 1024)
ALL_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 512, 1024)
#: The longest call that is not left out by default; the seconds that all rounds' calls take about; the fewest and most rounds.
LONGEST_CALL, SECONDS = 2.5, 2.0
FEWEST, MOST = 3, 20
#: Pages to measure the limits on, where caches are small.
LEAST_PAGES = 256 << 20


def pytest_generate_tests(metafunc):
    full = metafunc.config.getoption("--full")
    found = [call for call in calls() if full or call.default]
    points = [(call, rows) for call in found for rows in (call.rows or (ALL_ROWS if full else ROWS))]
    ids = [f"{call.id}-{rows}" for call, rows in points]
    metafunc.parametrize(("call", "rows"), points, ids=ids)


@pytest.fixture(scope="module")
def meters():
    made = Meters(max(footprints.wanted_bytes(), LEAST_PAGES))
    yield made
    made.close()


class Held:
    """The matrices of the call that was measured last, and their copies: points of a call follow each other."""

    def __init__(self):
        self.call, self.dispatches, self.copies = None, [], None

    def take(self, call: Call) -> tuple[list[list[Matrix]], Copies]:
        if call is not self.call:
            self.drop()
            self.dispatches = call.make()
            self.copies, self.call = Copies(self.dispatches, call.inputs, call.copies()), call
        return self.dispatches, self.copies

    def drop(self) -> None:
        if self.copies:
            self.copies.close()
        self.call, self.dispatches, self.copies = None, [], None


@pytest.fixture(scope="module")
def held():
    made = Held()
    yield made
    made.drop()


def test_linear(benchmark, held, meters, call, rows, pytestconfig):
    dispatches, copies = held.take(call)
    first = copies.linears[0]
    table = ktmoe.backends.get(first.backend).lookup(first.spec, first.activations).table
    bits = call.x(rows)
    xs = inputs(bits)
    seconds = rows * call.row_flops / max(meters.peak(table.name, 0.01) for _ in range(5))
    if seconds > LONGEST_CALL and not pytestconfig.getoption("--full"):
        pytest.skip(f"{rows} rows take more than {LONGEST_CALL} s; --full measures them")
    measurement = LinearRounds(call, copies, meters, table.name, xs)
    count = max(FEWEST, min(MOST, math.ceil(SECONDS / (measurement.calls * measurement.seconds))))
    benchmark.pedantic(measurement.run, setup=measurement.prepare, rounds=count, warmup_rounds=1)
    result = measurement.finish(benchmark.stats.stats.data)
    exact = outputs(copies.run(xs, np.float32, copy=measurement.last))
    for y, y32 in zip(outputs(measurement.y), exact, strict=True):
        assert np.array_equal(y32.astype(y.dtype).view(np.uint16), y.view(np.uint16))
    checked = sample(dispatches, bits, call.inputs)
    error = checked.of_bound(checked.of(exact), rounded=False)
    assert error <= 1
    benchmark.extra_info.update(
        record.shares(
            "linear",
            result.limit_shares,
            model=call.model,
            call=call.call,
            weights=call.weights,
            shapes=[list(shape) for shape in call.shapes],
            dispatches=len(call.dispatches),
            cached=call.cached,
            copies=len(copies),
            backend=first.backend,
            isa=table.name,
            activations=first.activations,
            rows=rows,
            nbytes=copies.nbytes,
            ms=result.seconds * 1e3,
            read_gb_s=result.bytes_rate / 1e9,
            gflop_s=result.flops_rate / 1e9,
            limit_read_gb_s=result.read_limit / 1e9,
            read_streams=result.streams,
            limit_gflop_s=result.peak_limit / 1e9,
            share_of_read_bandwidth=result.read_share,
            share_of_multiply_peak=result.peak_share,
            footprint_of_llc=footprints.of_cache(copies.nbytes * len(copies)),
            worst_error_of_bound=error,
            bound_of_output=checked.bound,
        )
    )
