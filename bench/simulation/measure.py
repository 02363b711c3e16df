"""Measures a machine's costs: kernels on one thread, memory by several numbers of threads, and what a call costs beside."""

from __future__ import annotations

import datetime
import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np

import ktmoe
from bench import cases, footprints, kernels, machine
from bench.models import Model, models
from bench.results_file import cpu_name
from bench.simulation import call
from bench.simulation.assumptions import Machine
from bench.simulation.costs import Costs, Kernel
from ktmoe import measuring
from ktmoe._native import core
from ktmoe.layer import MoELayer
from ktmoe.machine import threads as pool

#: Models whose kernels are measured: of MXFP4 and of bfloat16 weights.
MODELS = ("V4-Flash", "Qwen3-30B-A3B")
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 32, 33, 48, 64, 96, 128, 192)
ROUNDS = 12
#: A call from memory has so many experts; fewer of many rows, since those take long.
_EXPERTS, _CALL_ROWS = 8, 128
#: Experts that are as large as a core's L2, nearly, which the core has read since the last call when one begins.
_SWEPT = (1, 4, 16, 128)
_READ_SECONDS = 0.03
_HANDOFFS = 200
_TINY = 64
_SHARE_OF_L2 = 0.6

Found = dict[tuple, list[float]]


class Session:
    """A model's layers: from memory, swept between calls, and with next to no weights. experts: of those from memory."""

    def __init__(self, model: Model, stack: ExitStack, experts: int | None = None):
        self.model = model
        self.way = next(cases.auto_ways(model.make(1)))
        self.experts = experts or max(2 * _EXPERTS, footprints.wanted_bytes() // model.expert_bytes + 1)
        column = replace(model, hidden=1024, intermediate=64)
        self.small = replace(column, intermediate=64 * max(1, int(_SHARE_OF_L2 * machine.l2_bytes() / column.expert_bytes)))
        tiny = replace(model, hidden=_TINY, intermediate=_TINY)
        table = stack.enter_context(self.way.table(model.make(1)))
        shapes = (model, self.experts), (self.small, max(_SWEPT)), (tiny, model.experts)
        self.memory, self.swept, self.tiny = (
            stack.enter_context(MoELayer(kernels.copies(*shape), self.way.backend, self.way.activations)) for shape in shapes
        )
        self.limits = measuring.settled(self.memory, table)
        self._next = 0
        self._inputs: dict[tuple[int, int], measuring.MeasuredBatch] = {}

    def round(self) -> Iterator[tuple[tuple, float]]:
        """(what, seconds or a rate) of one thread."""
        name = self.model.weights
        yield ("peak", name), self.limits.peak(_READ_SECONDS)
        for rows in ROWS:
            for what, layer in (("memory", self.memory), ("beside memory", self.tiny)):
                yield (what, name, rows), self._seconds(layer, rows, _experts_of(rows))
        for experts in _SWEPT:
            self._seconds(self.swept, 1, experts)
            yield ("before", experts), self._seconds(self.tiny, 1, self.model.top_k)

    def _seconds(self, layer: MoELayer, rows: int, experts: int) -> float:
        """The seconds of a call with so many rows of so many experts each, others each time but for one of a small layer."""
        tokens = max(rows, _EXPERTS) if experts == _EXPERTS else rows  # from a few tokens on, the driver copies rows of x
        if (tokens, layer.hidden) not in self._inputs:
            self._inputs[tokens, layer.hidden] = next(kernels.one_expert_each(layer, tokens))
        ids = (np.arange(tokens)[:, None] + np.arange(experts * rows // tokens)) % experts
        if layer is self.memory or experts > 1:
            self._next += experts
            ids = (self._next + ids) % layer.num_experts
        weights = np.full(ids.shape, 1 / experts, np.float32)
        start = time.perf_counter()
        layer.forward(self._inputs[tokens, layer.hidden].x, ids, weights)
        return time.perf_counter() - start

    def kernel(self, found: Found) -> Kernel:
        name, way = self.model.weights, self.way
        ns = []
        for rows in ROWS:
            seconds, beside = (statistics.median(found[what, name, rows]) for what in ("memory", "beside memory"))
            ns.append(1e9 * (seconds - beside) / (_experts_of(rows) * self.model.expert_bytes))
        peak = statistics.median(found["peak", name]) / 1e9
        return Kernel(name, way.backend, way.isa, way.activations, peak, list(ROWS), ns)


def _experts_of(rows: int) -> int:
    """The experts of a call from memory."""
    return max(1, min(_EXPERTS, _CALL_ROWS // rows))


def take_threads(number: int) -> None:
    """Use so many threads from now on, whatever uses the pool."""
    ktmoe.set_num_threads(number)
    pool.configure()


@contextmanager
def all_threads() -> Iterator[int]:
    """How many there are, which are taken again at the end."""
    most = ktmoe.get_num_threads()
    try:
        yield most
    finally:
        take_threads(most)


def numbers_of_threads(most: int) -> list[int]:
    """1, 2, 4, ... and the most."""
    return sorted({*(1 << n for n in range(most.bit_length())), most})


def machine_round(session: Session, most: int) -> Iterator[tuple[tuple, float]]:
    """What all threads together can do. One thread is taken afterwards."""
    for number in reversed(numbers_of_threads(most)):
        take_threads(number)
        if number == most > 1:
            yield ("handoff",), core.pool_handoff(_HANDOFFS)
        yield ("read", number), session.limits.read(_READ_SECONDS)


def costs_of(sessions: list[Session], found: Found) -> Costs:
    """Medians of what the rounds found."""
    fields = machine.cpu_fields()
    read = {what[1]: statistics.median(rates) / 1e9 for what, rates in found.items() if what[0] == "read"}
    return Costs(
        machine=cpu_name(fields["name"], fields["family"], fields["model"]),
        date=datetime.date.today(),
        commit=machine.commit(),
        threads=max(read),
        read_gb_s={f"{number}": rate for number, rate in sorted(read.items())},
        before=[
            {"read_mb": experts * sessions[0].small.expert_bytes / 1e6, "us": statistics.median(found["before", experts]) * 1e6}
            for experts in _SWEPT
        ],
        route_ns=_route_ns(sessions[0]),
        handoff_us=statistics.median(found.get(("handoff",), [0.0])) * 1e6,
        kernel=[session.kernel(found) for session in sessions],
    )


def measured(rounds: int = ROUNDS) -> Costs:
    """The costs of this machine, measured now."""
    found: Found = {}
    with all_threads() as most, ExitStack() as stack:
        sessions = [Session(models()[name], stack) for name in MODELS]
        for _ in range(rounds):
            parts = [machine_round(sessions[0], most), *(session.round() for session in sessions)]
            for what, value in itertools.chain.from_iterable(parts):
                found.setdefault(what, []).append(value)
        return costs_of(sessions, found)


def _route_ns(session: Session) -> float:
    """Nanoseconds of a slot, for routing it and making the lists of a machine with many threads."""
    model, way = session.model, session.way
    ids = next(measuring.random_batches(1024, model.top_k, model.experts, _TINY)).ids
    schedule = call.schedule_of(model, ids, Machine(1, 128, 1.0), Kernel(model.weights, way.backend, way.isa, way.activations))
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        schedule.fill(0)
        seconds.append(time.perf_counter() - start)
    return 1e9 * statistics.median(seconds) / ids.size
