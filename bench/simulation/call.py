"""A forward call on a made-up machine. core.Schedule makes the driver's own lists and deals them; no rule of it stands here."""

from __future__ import annotations

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
    group_of = [group for group, (_, _, size) in enumerate(teams.groups) for _ in range(size)]

    def worker(index: int) -> Worker:
        node, first, _ = teams.groups[group_of[index]]
        yield Work(_wake(machine, group_of[index], index - first), item=False)
        if schedule.staged_bytes:
            yield _copied(schedule.staged_bytes / machine.threads, node, shards[node].x_leaves, core_read)
            clock.pass_gate(met)
            yield met
        for shard, (first, size, _, _) in zip(shards, teams.of, strict=True):
            if first <= index < first + size:
                for work in shard.phases(index):
                    yield work._replace(seconds=work.seconds / speeds[index]) if isinstance(work, Work) else work

    ran = clock.go([worker(index) for index in range(machine.threads)])
    if machine.threads > 1:
        ran.seconds += machine.near + machine.far  # the last of a group, then the caller
    return ran


def _wake(machine: Machine, group: int, place: int) -> float:
    """By a tree: the caller wakes the groups' first workers, each of those its group."""
    return machine.far * (group > 0) + machine.near * (place > 0)


def _copied(nbytes: float, node: int, leaves: bool, core_read: float) -> Work:
    """Rows of x: read, and written to lines that have to be read."""
    traffic = 3 * nbytes
    return Work(traffic / core_read, traffic if leaves else 0.0, node)
