"""Measures a machine's costs (costs.py): one thread with a kernel, the memory by all numbers of threads, and what a call costs beside."""

from __future__ import annotations

import datetime
import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

import ktmoe
from bench import cases, footprints, kernels, machine
from bench.models import Model, models
from bench.results_file import short_name
from bench.simulation import call, costs
from bench.simulation.assumptions import Machine
from bench.test_kernels import one_expert_each
from ktmoe import measure
from ktmoe._native import core
from ktmoe.layer import MoELayer

#: Models whose kernels are measured: of MXFP4 and of bfloat16 weights.
MODELS = ("V4-Flash", "Qwen3-30B-A3B")
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 32, 33, 48, 64, 96, 128, 192)
ROUNDS = 5
#: Experts of a call from memory, so that what it costs beside its items is little.
_EXPERTS = 4
_READ_SECONDS = 0.03
_HANDOFFS = 200
_TINY = 64
_SHARE_OF_L2 = 0.6


class Session:
    """A model's layers: from memory, from a core's cache, and with next to no weights."""

    def __init__(self, model: Model, stack: ExitStack):
        self.way = next(cases.auto_ways(model.make(1)))
        count = max(2 * _EXPERTS, footprints.wanted_bytes() // model.expert_bytes + 1)
        small = replace(model, hidden=1024, intermediate=64)
        panels = max(1, int(_SHARE_OF_L2 * machine.l2_bytes() / small.expert_bytes))
        self.small = replace(small, intermediate=64 * panels)
        tiny = replace(model, hidden=_TINY, intermediate=_TINY)
        self.model, self.table = model, stack.enter_context(self.way.table(model.make(1)))
        self.memory, self.cache, self.tiny = (
            stack.enter_context(MoELayer(kernels.copies(shape, of), self.way.backend, self.way.activations))
            for shape, of in ((model, count), (self.small, 1), (tiny, count))
        )
        self.limits = measure.settled(self.memory, self.table)
        self._experts = itertools.cycle(range(0, count - _EXPERTS + 1, _EXPERTS))

    def batch(self, layer: MoELayer, rows: int, experts: int) -> measure.Batch:
        """So many rows of each of so many experts, which were not used for long."""
        first = next(self._experts) if experts > 1 else 0
        batch = next(one_expert_each(layer, rows))
        ids = np.tile(np.arange(first, first + experts), (rows, 1))
        return replace(batch, ids=ids, weights=np.full(ids.shape, 1 / experts, np.float32))


def seconds_of(layer: MoELayer, batch: measure.Batch) -> float:
    start = time.perf_counter()
    layer.forward(batch.x, batch.ids, batch.weights)
    return time.perf_counter() - start


def measured(rounds: int = ROUNDS) -> costs.Costs:
    """Of this machine, with as many threads as ktmoe takes at most for the memory, and with one for all else."""
    most = ktmoe.get_num_threads()
    try:
        with ExitStack() as stack:
            sessions = [Session(models()[name], stack) for name in MODELS]
            return _costs(sessions, most, rounds)
    finally:
        ktmoe.set_num_threads(most)


def _costs(sessions: list[Session], most: int, rounds: int) -> costs.Costs:
    found: dict[tuple, list[float]] = {}
    for _ in range(rounds):
        for key, value in _round(sessions, most):
            found.setdefault(key, []).append(value)
    medians = {key: statistics.median(values) for key, values in found.items()}
    ids = np.concatenate([next(measure.random_batches(1024, s.model.top_k, s.model.experts, _TINY)).ids for s in sessions[:1]])
    return costs.Costs(
        machine=f"{short_name(machine.cpu_fields()['name'])} {machine.cpu_fields()['family']}-{machine.cpu_fields()['model']}",
        date=datetime.date.today(),
        commit=machine.commit(),
        threads=most,
        read_gb_s={f"{threads}": medians["read", threads] / 1e9 for threads in _numbers(most)},
        before_us=medians["before",] * 1e6,
        route_ns=_route_ns(sessions[0], ids),
        handoff_us=medians["handoff",] * 1e6 if most > 1 else 0.0,
        kernel=[_kernel(session, medians) for session in sessions],
    )


def _numbers(most: int) -> list[int]:
    """1, 2, 4, ... and the most."""
    return sorted({*(1 << n for n in range(most.bit_length())), most})


def _round(sessions: list[Session], most: int) -> Iterator[tuple[tuple, float]]:
    """(what, seconds or a rate)."""
    for threads in _numbers(most):
        ktmoe.set_num_threads(threads)
        yield ("read", threads), sessions[0].limits.read(_READ_SECONDS)
    if most > 1:
        yield ("handoff",), core.pool_handoff(_HANDOFFS)
    ktmoe.set_num_threads(1)
    for session in sessions:
        name = session.model.weights
        yield ("peak", name), session.limits.peak(_READ_SECONDS)
        for rows in ROWS:
            yield ("memory", name, rows), seconds_of(session.memory, session.batch(session.memory, rows, _EXPERTS))
            tiny = session.batch(session.tiny, rows, _EXPERTS)
            yield ("tiny", name, rows), seconds_of(session.tiny, tiny)
            if session is sessions[0] and rows == 1:
                yield ("before",), seconds_of(session.tiny, tiny)
            yield from _cached(session, name, rows)


def _cached(session: Session, name: str, rows: int) -> Iterator[tuple[tuple, float]]:
    """From L2, and beside it: the best of some calls, since an interruption is long beside such a call."""
    for what, layer in (("cache", session.cache), ("beside", session.tiny)):
        batch = session.batch(layer, rows, 1)
        yield (what, name, rows), min(seconds_of(layer, batch) for _ in range(5))


def _kernel(session: Session, medians: dict[tuple, float]) -> costs.Kernel:
    name, way = session.model.weights, session.way
    memory = [
        1e9 * (medians["memory", name, rows] - medians["tiny", name, rows]) / (_EXPERTS * session.model.expert_bytes)
        for rows in ROWS
    ]
    cache = [1e9 * (medians["cache", name, rows] - medians["beside", name, rows]) / session.small.expert_bytes for rows in ROWS]
    peak = medians["peak", name] / 1e9
    return costs.Kernel(name, way.backend, way.isa, way.activations, peak, list(ROWS), memory, cache)


def _route_ns(session: Session, ids: np.ndarray) -> float:
    """Of a slot, in the lists of a machine with many threads."""
    kernel = costs.Kernel(session.model.weights, session.way.backend, session.way.isa, session.way.activations, 1, [], [], [])
    schedule = call.schedule_of(session.model, ids, Machine(1, 128, 1.0), kernel)
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        schedule.fill(0)
        seconds.append(time.perf_counter() - start)
    return 1e9 * statistics.median(seconds) / ids.size
