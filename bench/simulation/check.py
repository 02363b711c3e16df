"""Does the simulation agree with measured calls, on as many threads as this machine has?

Costs, bandwidth and calls are measured in the same rounds, since a virtual machine's speed changes from minute to minute.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from bench import footprints, machine
from bench.models import models
from bench.simulation import call
from bench.simulation.assumptions import Machine
from bench.simulation.costs import Costs
from bench.simulation.measure import Found, Session, all_threads, costs_of, machine_round, numbers_of_threads, take_threads
from ktmoe import measuring
from ktmoe.machine import numa

MODEL = "V4-Flash"
#: (tokens, experts that they are among): 256 among 16 are 96 rows an expert, as 4096 among 256 are.
POINTS = ((1, 256), (16, 256), (256, 256), (256, 16))
#: The simulation shall be as near to the measured calls.
WITHIN = 0.1
#: Short calls are repeated so often in a round.
_REPEATS = {1: 5}
ROUNDS = 9


@dataclass(frozen=True)
class Agreement:
    """Seconds of calls with so many tokens among so many experts; medians."""

    threads: int
    tokens: int
    experts: int
    measured: float
    simulated: float

    @property
    def ratio(self) -> float:
        return self.simulated / self.measured

    @property
    def fields(self) -> dict:
        """The fields as a file has them."""
        ms = {"measured_ms": 1e3 * self.measured, "simulated_ms": 1e3 * self.simulated}
        return {"model": MODEL, "threads": self.threads, "tokens": self.tokens, "experts": self.experts, **ms}


def check(rounds: int = ROUNDS) -> tuple[list[Agreement], Costs]:
    """Raises ValueError where there is too little memory."""
    model = models()[MODEL]
    most_experts = max(experts for _, experts in POINTS)
    if machine.usable_bytes(footprints.MEMORY_SHARE) < most_experts * model.expert_bytes:
        raise ValueError(
            f"{MODEL}'s {most_experts} experts take {most_experts * model.expert_bytes / 1e9:.1f} GB; there is less memory"
        )
    found: Found = {}
    with all_threads() as most, ExitStack() as stack:
        session = Session(model, stack, most_experts)
        calls = Calls(session, most)
        for _ in range(rounds):
            for what, value in itertools.chain(machine_round(session, most), session.round(), calls.round()):
                found.setdefault(what, []).append(value)
        costs = costs_of([session], found)
    return [calls.agreement(costs, *point) for point in calls.seconds], costs


class Calls:
    """Measured ones. seconds: of each, by (threads, tokens, experts)."""

    def __init__(self, session: Session, most: int):
        self._session, self._most = session, most
        shape = session.model.top_k, session.memory.num_experts, session.model.hidden
        self._batches = {point: measuring.random_batches(point[0], *shape, among=point[1], seed=1) for point in POINTS}
        self.seconds: dict[tuple[int, int, int], list[tuple[np.ndarray, float]]] = {}

    def round(self) -> Iterator[tuple[tuple, float]]:
        """Yields nothing: what it measures is compared batch by batch."""
        for (tokens, among), threads in itertools.product(POINTS, numbers_of_threads(self._most)):
            take_threads(threads)
            batches = itertools.islice(self._batches[tokens, among], _REPEATS.get(tokens, 1) + 1)
            self._call(next(batches))  # the first one with these threads
            for batch in batches:
                self.seconds.setdefault((threads, tokens, among), []).append((batch.ids, self._call(batch)))
        take_threads(1)
        yield from ()

    def _call(self, batch: measuring.MeasuredBatch) -> float:
        start = time.perf_counter()
        self._session.memory.forward(batch.x, batch.ids, batch.weights)
        return time.perf_counter() - start

    def agreement(self, costs: Costs, threads: int, tokens: int, among: int) -> Agreement:
        """Medians over the same batches."""
        pairs = self.seconds[threads, tokens, among]
        simulated = [call.simulate(self._session.model, ids, here(costs, threads), costs).seconds for ids, _ in pairs]
        return Agreement(threads, tokens, among, statistics.median(s for _, s in pairs), statistics.median(simulated))


def here(costs: Costs, threads: int) -> Machine:
    """This machine, whose cores are taken to share one L3."""
    cores, near = len(numa.usable_cpus()), costs.handoff_us * 1e-6
    return Machine(
        nodes=1,
        threads=threads,
        bandwidth=costs.read_gb_s[f"{threads}"] * 1e9,
        cores=cores,
        domain_cores=cores,
        domain_bytes=machine.last_cache_bytes(),
        near=near,
        far=near,
    )
