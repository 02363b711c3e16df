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

from bench import footprints, machine
from bench.models import models
from bench.simulation import call
from bench.simulation.assumptions import Machine
from bench.simulation.costs import Costs
from bench.simulation.measure import Found, Session, all_threads, costs_of, machine_round, numbers_of_threads, take_threads
from ktmoe import measure
from ktmoe.machine import numa

MODEL = "V4-Flash"
#: (tokens, experts that they are among): 512 among 32 are 96 rows an expert, as 4096 among 256 are.
POINTS = ((1, 256), (16, 256), (256, 256), (512, 32))
#: A short call is repeated so often in a round, and its median counts.
_REPEATS = {1: 9, 16: 3}
ROUNDS = 5


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


def check(rounds: int = ROUNDS) -> tuple[list[Agreement], Costs]:
    model = models()[MODEL]
    found: Found = {}
    with all_threads() as most, ExitStack() as stack:
        count = max(experts for _, experts in POINTS)
        if machine.usable_bytes(footprints.MEMORY_SHARE) < count * model.expert_bytes:
            raise ValueError(f"{MODEL}'s {count} experts take {count * model.expert_bytes / 1e9:.1f} GB, there is less memory")
        session = Session(model, stack, count)
        batches = {(tokens, among): _batches(session, tokens, among) for tokens, among in POINTS}
        for _ in range(rounds):
            parts = machine_round(session, most), session.round(), _calls(session, batches, most)
            for what, value in itertools.chain(*parts):
                found.setdefault(what, []).append(value)
        costs = costs_of([session], found)
    agreed = [
        Agreement(threads, *point, statistics.median(found["call", threads, *point]), _simulated(costs, threads, *point))
        for point in POINTS
        for threads in numbers_of_threads(most)
    ]
    return agreed, costs


def _batches(session: Session, tokens: int, among: int, seed: int = 1) -> Iterator[measure.Batch]:
    return measure.random_batches(
        tokens, session.model.top_k, session.memory.num_experts, session.model.hidden, among=among, seed=seed
    )


def _calls(session: Session, batches: dict, most: int) -> Iterator[tuple[tuple, float]]:
    for (tokens, among), threads in itertools.product(POINTS, numbers_of_threads(most)):
        take_threads(threads)
        seconds = []
        for batch in itertools.islice(batches[tokens, among], _REPEATS.get(tokens, 1) + 1):
            start = time.perf_counter()
            session.memory.forward(batch.x, batch.ids, batch.weights)
            seconds.append(time.perf_counter() - start)
        yield ("call", threads, tokens, among), statistics.median(seconds[1:])
    take_threads(1)


def _simulated(costs: Costs, threads: int, tokens: int, among: int) -> float:
    """On this machine, whose cores share an L3. The median of some batches."""
    model = models()[MODEL]
    cores = len(numa.usable_cpus())
    near = costs.handoff_us * 1e-6
    here = Machine(
        nodes=1,
        threads=threads,
        bandwidth=costs.read_gb_s[f"{threads}"] * 1e9,
        cores=cores,
        domain_cores=cores,
        domain_bytes=machine.last_cache_bytes(),
        near=near,
        far=near,
    )
    batches = measure.random_batches(tokens, model.top_k, model.experts, 64, among=among, seed=2)
    return statistics.median(call.simulate(model, batch.ids, here, costs).seconds for batch in itertools.islice(batches, 5))
