"""NUMA nodes: which there are for this process, which of them a layer is put on, and where its weights are cut for them."""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ktmoe._native import core
from ktmoe.errors import InputError
from ktmoe.machine import topology
from ktmoe.machine.number_lists import listed, numbers, ranges
from ktmoe.machine.system_root import under
from ktmoe.messages import show
from ktmoe.weight_spec import WeightSpec

#: Where Linux says which nodes there are, and which memory this process may use; tests put folders of their own here.
NODES = Path("/sys/devices/system/node")
STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Placement:
    """Which NUMA nodes hold a layer's shards, in the order in which their partial outputs are added."""

    #: Empty: not bound to nodes, one shard, threads anywhere.
    nodes: tuple[int, ...]
    #: Usable logical CPUs of each node, in the same order.
    cpus: tuple[frozenset[int], ...]

    @property
    def domains(self) -> tuple[tuple[topology.Domain, ...], ...]:
        """The L3 caches of each shard's CPUs; if it is not bound, of all CPUs that this process may use."""
        return tuple(map(topology.domains, self.cpus or [usable_cpus()]))

    @property
    def shards(self) -> int:
        """The number of shards into which the intermediate dimension is cut."""
        return max(1, len(self.nodes))

    def first(self, count: int) -> Placement:
        """The placement on at most so many of the nodes, the first; where one is left of several, layers are not bound."""
        if count >= self.shards:
            return self
        return Placement(self.nodes[:count], self.cpus[:count]) if count > 1 else UNBOUND


UNBOUND = Placement((), ())


def memory_nodes(root: Path | None = None) -> tuple[frozenset[int], frozenset[int]]:
    """Nodes that have memory, and those of them whose memory the cpuset lets this process use; both empty if nothing says.

    root: the folder that stands for /; None for this system's own.
    """
    nodes = under(root, NODES)
    present = listed(nodes / "has_memory") or listed(nodes / "has_normal_memory")  # the former is younger
    allowed = present
    try:
        for line in under(root, STATUS).read_text().splitlines():
            if line.startswith("Mems_allowed_list:"):
                allowed = present & numbers(line.partition(":")[2])
    except (OSError, ValueError):
        pass
    return present, allowed


def usable_cpus() -> set[int]:
    """Logical CPUs that this process may run on: the affinity mask of its first thread, whatever the calling one is kept to."""
    return core.usable_cpus()


def unpin() -> None:
    """Let the calling thread, one of ktmoe's own, run on all usable_cpus(): by itself it is kept to where its starter was."""
    with suppress(OSError):
        os.sched_setaffinity(0, usable_cpus())


def nodes() -> dict[int, frozenset[int]]:
    """NUMA nodes that have memory that we may use, ascending, and the usable logical CPUs of each; nodes without are left out.

    A CPU whose own node has no memory for us counts to the nearest one that has. Empty where the system does not say.
    """
    memory = memory_nodes()[1]
    if not memory:
        return {}
    usable = usable_cpus()
    found: dict[int, frozenset[int]] = {node: frozenset() for node in sorted(memory)}
    for node, cpus in _all_cpus().items():
        if here := cpus & usable:
            found[_nearest(node, memory)] |= here
    return {node: cpus for node, cpus in found.items() if cpus}


def place(numa_nodes: Sequence[int] | None = None) -> Placement:
    """The placement of a layer on these nodes, in their order; by default on all that can be used, if that is more than one."""
    usable = nodes()
    if numa_nodes is None:
        return Placement(tuple(usable), tuple(usable.values())) if len(usable) > 1 else UNBOUND
    try:
        chosen = tuple(operator.index(node) for node in numa_nodes)
    except TypeError:
        chosen = ()
    if not chosen:
        raise InputError(f"numa_nodes must be None or a sequence of at least one node's number, found {show(numa_nodes)}")
    for node in chosen:
        if node not in usable:
            there = ", ".join(f"{n} (CPUs {ranges(cpus)})" for n, cpus in usable.items()) or "none"
            raise InputError(f"numa_nodes: node {node} cannot be used: {_why_not(node)}; usable nodes: {there}")
        if chosen.count(node) > 1:
            raise InputError(f"numa_nodes must be different nodes, found {node} more than once in {list(chosen)}")
    return Placement(chosen, tuple(usable[node] for node in chosen))


def placement_of(experts: WeightSpec, numa_nodes: Sequence[int] | None = None) -> Placement:
    """place(), for a layer of these experts."""
    placement = place(numa_nodes)
    if numa_nodes is None:  # not on more nodes than there is something for
        placement = placement.first(-(-experts.intermediate // experts.shard_unit))
    return placement


def explain_default() -> str:
    """The default placement and why it is, for show_config()."""
    usable = nodes()
    if len(usable) < 2:
        return f"{'one' if usable else 'unknown here'}, layers are not bound"
    sizes = (f"{node} ({len(cpus)} CPU{'s' * (len(cpus) > 1)})" for node, cpus in usable.items())
    return f"{len(usable)}: {', '.join(sizes)}"


def split(intermediate: int, unit: int, shards: int) -> list[tuple[int, int]]:
    """Where each shard of the intermediate dimension begins and ends: whole units, the first shards have one more if need be.

    unit: what must not be cut, max(32, the k that share one of down's scales). The last one may be shorter.
    """
    units = -(-intermediate // unit)
    if not 1 <= shards <= units:
        raise InputError(
            f"an intermediate size of {intermediate} can be cut at multiples of {unit} into 1 to {units} shards, found {shards}"
        )
    each, more = divmod(units, shards)
    ends = [min(intermediate, unit * (each * n + min(n, more))) for n in range(shards + 1)]
    return list(itertools.pairwise(ends))


def _why_not(node: int) -> str:
    """Why a layer cannot be put on a node."""
    cpus, (present, allowed) = _all_cpus(), memory_nodes()
    if not cpus:
        return f"this system names no NUMA nodes in {NODES}"
    if node not in cpus:
        return "there is none of that number"
    if node not in present:
        return "it has no memory"
    if node not in allowed:
        return f"the cpuset of this process allows memory of {ranges(allowed) or 'no node'} only"
    if not cpus[node]:
        return "it has no CPUs"
    return f"this process may run on CPUs {ranges(usable_cpus())} only, the node's are {ranges(cpus[node])}"


def _all_cpus() -> dict[int, frozenset[int]]:
    """All nodes, ascending, and the CPUs of each, whether this process may use them or not."""
    found = (int(folder.name[4:]) for folder in NODES.glob("node*") if folder.name[4:].isdecimal())
    return {node: listed(NODES / f"node{node}/cpulist") for node in sorted(found)}


def _nearest(node: int, candidates: Iterable[int]) -> int:
    """The node itself if it is one of the candidates, or else the least distant one, of equal ones that of the least number."""
    if node in candidates:
        return node
    try:  # a distance for each node there is, ascending
        distances = dict(zip(_all_cpus(), map(int, (NODES / f"node{node}/distance").read_text().split()), strict=True))
    except (OSError, ValueError):
        distances = {}
    return min(candidates, key=lambda other: (distances.get(other, 0), other))
