"""A forward call on a made-up machine. core.Schedule makes the driver's own lists and deals them; no rule of it stands here."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from bench.models import Model
from bench.simulation.assumptions import Machine
from bench.simulation.costs import Costs, Kernel
from bench.simulation.events import Clock, Gate, Run, Work, Worker
from bench.simulation.phases import Shard
from ktmoe._native import core
from ktmoe.backends.base import Plan
from ktmoe.machine import numa


@dataclass(frozen=True)
class Simulated:
    """A call. nbytes: packed weights that the batch needs, each once. read: bytes from all memory. bandwidth, peak: of all
    threads.

    Shares are of threads x seconds. busy: with items. before: while Python runs and the caller routes. dealing: taking runs,
    waking and passing on. gates: waiting for items of phase A. end: after a worker's last item, until the last worker's.
    """

    seconds: float
    busy: float
    before: float
    dealing: float
    gates: float
    end: float
    nbytes: float
    read: float
    flops: float
    bandwidth: float
    peak: float

    @property
    def idle(self) -> float:
        """All but items."""
        return 1 - self.busy

    @property
    def efficiency(self) -> float:
        """max(bytes / bandwidth, FLOPs / peak) / seconds."""
        return max(self.nbytes / self.bandwidth, self.flops / self.peak) / self.seconds


def simulate(model: Model, ids: np.ndarray, machine: Machine, costs: Costs, *, seed: int = 0) -> Simulated:
    """ids: int64 [tokens, top_k]. seed: of the machine's jitter."""
    kernel = costs.of(weights_of(model))
    schedule, teams = schedule_of(model, ids, machine, kernel), machine.teams
    speeds = 1 + machine.jitter * np.random.default_rng(seed).standard_normal(machine.threads)
    nbytes = len(np.unique(ids)) * model.expert_bytes
    before, chunks = costs.before_seconds(nbytes / machine.threads), []
    for first in range(0, len(ids), schedule.chunk):
        if first:
            schedule.fill(first)
        before += costs.route_ns * 1e-9 * schedule.slots
        chunks.append(run(schedule, teams, machine, kernel, costs.core_read, speeds))
    seconds = before + sum(chunk.seconds for chunk in chunks)
    sums = (sum(getattr(chunk, name).sum() for chunk in chunks) for name in ("busy", "overhead", "waited", "ended"))
    busy, dealing, gates, end = (float(total) / (machine.threads * seconds) for total in sums)
    return Simulated(
        seconds=seconds,
        busy=busy,
        before=before / seconds,
        dealing=dealing,
        gates=gates,
        end=end,
        nbytes=nbytes,
        read=sum(float(chunk.nbytes.sum()) for chunk in chunks),
        flops=ids.size * model.slot_flops,
        bandwidth=min(machine.bandwidth, machine.threads * costs.core_read),
        peak=machine.threads * kernel.peak_gflop_s * 1e9,
    )


def weights_of(model: Model) -> str:
    """Biases make no difference to a kernel."""
    return model.weights.partition(",")[0]


def schedule_of(model: Model, ids: np.ndarray, machine: Machine, kernel: Kernel) -> core.Schedule:
    experts = model.make(model.experts)
    columns = numa.split(model.intermediate, experts.shard_unit, machine.nodes)
    return core.Schedule(
        core.kernel_table(kernel.isa), experts, Plan(activations=kernel.activations), columns, machine.teams, ids
    )


def run(
    schedule: core.Schedule, teams: core.Teams, machine: Machine, kernel: Kernel, core_read: float, speeds: np.ndarray
) -> Run:
    """One dispatch of the pool, which computes the chunk that the schedule was filled with. speeds: of the workers."""
    clock = Clock(machine.threads, machine.nodes, machine.node_bandwidth, machine.sharpness)
    summed: dict[tuple[int, int], int] = {}
    shards = [Shard(number, schedule, teams, machine, kernel, core_read, clock, summed) for number in range(machine.nodes)]
    met = Gate(machine.threads, 2 * (machine.near + machine.far))
    node_of = [node for node, _, size in teams.groups for _ in range(size)]
    begins = begin_times(teams, machine)

    def worker(index: int) -> Worker:
        node = node_of[index]
        yield Work(begins[index], item=False)
        if schedule.staged_bytes:
            yield _copied(schedule.staged_bytes / machine.threads, node, shards[node].x_leaves, core_read)
            clock.pass_gate(met)
            yield met
        for shard, (first, size, _, _) in zip(shards, teams.of, strict=True):
            if first <= index < first + size:
                for work in shard.phases(index):
                    yield work._replace(seconds=work.seconds / speeds[index]) if isinstance(work, Work) else work

    ran = clock.go([worker(index) for index in range(machine.threads)])
    ran.seconds = end_time(teams, machine, ran.busy + ran.overhead + ran.waited)
    return ran


def begin_times(teams: core.Teams, machine: Machine) -> list[float]:
    """When each worker begins with its items. Whoever is awake wakes the next group, until all are, as base/pool.c has it.

    The caller wakes its own group first. To wake another group takes `far`; all but its first worker see it `near` later.
    """
    begins, sizes, woken = [0.0] * machine.threads, [(first, size) for _, first, size in teams.groups], 0
    awake = [(0.0, 0)] if machine.threads > 1 else []  # (when it is free, worker)
    while awake:
        now, worker = heapq.heappop(awake)
        if woken == len(sizes):
            begins[worker] = now
            continue
        first, size = sizes[woken]
        now += machine.far if woken else machine.near
        heapq.heappush(awake, (now, worker))
        for other in range(first + (not woken), first + size):
            heapq.heappush(awake, (now + machine.near * (other > first and woken > 0), other))
        woken += 1
    return begins


def end_time(teams: core.Teams, machine: Machine, ends: np.ndarray) -> float:
    """When the call is over. ends: of the workers.

    The caller shuts the groups' doors in a row, and waits at each until nobody is behind it, as base/pool.c has it.
    """
    now = float(ends[0])
    if machine.threads == 1:
        return now
    for group, (_, first, size) in enumerate(teams.groups):
        step = machine.far if group else machine.near
        last = float(ends[first : first + size].max())
        now = max(now, last) + step
    return now


def _copied(nbytes: float, node: int, leaves: bool, core_read: float) -> Work:
    """Rows of x: read, and written to lines that have to be read."""
    traffic = 3 * nbytes
    return Work(traffic / core_read, traffic if leaves else 0.0, node)
