"""The pool's latencies, and what a call costs beside its two phases. Shares are of the least that the machine allows.

That least is a handoff: one thread sees the cache line that another one wrote. Targets are printed, not asserted.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import pytest

import ktmoe
from bench import footprints, kernels, record
from bench.cases import EVERYWHERE, auto_ways
from bench.models import models
from ktmoe import measuring
from ktmoe._native import core
from ktmoe.layer import MoELayer
from ktmoe.machine import environment, numa, threads

HANDOFFS, GATES = 200, 200
#: Microseconds for which the workers were idle: within the spin, and ten times as long.
HOT_US = 20
SLEEPS = 10
#: A side of the matrices of a layer that costs nothing but its call.
TINY = 64


@pytest.fixture(autouse=True)
def awake():
    """Threads that each have a CPU: else a latency is that of the scheduler."""
    number, usable = ktmoe.get_num_threads(), len(numa.usable_cpus())
    if not 2 <= number <= usable:
        pytest.skip(f"latencies are between 2 threads or more that have a CPU each; there are {number} threads, {usable} CPUs")
    threads.configure()


def run(benchmark, latency, rounds, work, target, **fields):
    """latency: () -> seconds. Each round measures a handoff as well."""
    handoffs, latencies = [], []

    def measured():
        latencies.append(latency())

    benchmark.pedantic(measured, setup=lambda: handoffs.append(core.pool_handoff(HANDOFFS)), rounds=rounds, warmup_rounds=3)
    handoffs, latencies = handoffs[-rounds:], latencies[-rounds:]
    assert min(latencies) > 0
    shares = [handoff / latency for handoff, latency in zip(handoffs, latencies, strict=True)]
    low, *_, high = statistics.quantiles(latencies, n=10)
    benchmark.extra_info.update(
        record.shares(
            "pool",
            shares,
            work=work,
            us=statistics.median(latencies) * 1e6,
            rounds_us=[float(f"{latency * 1e6:.4g}") for latency in latencies],
            handoff_us=statistics.median(handoffs) * 1e6,
            most_us=(low * 1e6, high * 1e6),
            target=target,
            **fields,
        )
    )


@pytest.mark.parametrize("state", ["hot", "cold"])
def test_wake_up(benchmark, state):
    spin = environment.spin_us()
    if state == "hot" and spin <= HOT_US:
        pytest.skip(f"workers spin {spin} us and are asleep after {HOT_US} us")
    idle = HOT_US if state == "hot" else SLEEPS * max(spin, HOT_US)
    work = f"wake-up to work, {'spinning' if state == 'hot' else 'asleep'}, idle for {idle} us"
    run(benchmark, lambda: core.pool_wake(idle), 300, work, "under 3 us" if state == "hot" else "none")


def test_gate(benchmark):
    run(benchmark, lambda: core.pool_gate(GATES), 100, "gate of all threads", "none")


def test_call(benchmark):
    """A token of a model's layer, and of a tiny layer with as many experts: Python, checks, routing, wake-up and gates, and
    next to no work; only the encoding of x grows with the model. The two are called in turn."""
    shape = models()[EVERYWHERE]
    one = shape.make(1)
    way = next(auto_ways(one), None)
    if way is None:
        pytest.skip("what auto takes is no native backend")
    count = footprints.footprint(shape, full=False).experts
    large, tiny = (kernels.copies(model, count) for model in (shape, replace(shape, hidden=TINY, intermediate=TINY)))
    with MoELayer(large, way.backend) as layer, MoELayer(tiny, way.backend) as least:
        batches, calls = measuring.random_batches(1, shape.top_k, count, shape.hidden), []
        small = next(measuring.random_batches(1, shape.top_k, count, TINY))

        def latency():
            batch = next(batches)
            start = time.perf_counter()
            layer.forward(batch.x, batch.ids, batch.weights)
            middle = time.perf_counter()
            y = least.forward(small.x, small.ids, small.weights)
            seconds = time.perf_counter() - middle
            calls.append((seconds / (middle - start), y))
            return seconds

        rounds = 100
        work = f"a call beside its phases, 1 token of {EVERYWHERE}, {least.backend}"
        run(benchmark, latency, rounds, work, "under 3 % of the call")
        assert measuring.check(tiny, least, small).error <= 1
        assert all((y == calls[0][1]).all() for _, y in calls)
    benchmark.extra_info["share_of_call"] = statistics.median(share for share, _ in calls[-rounds:])
