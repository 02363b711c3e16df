"""Where threads run, and NUMA nodes, cores and L3 caches that this machine does not have: folders as Linux's own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from ktmoe.machine import numa, topology

CPUS = sorted(os.sched_getaffinity(0))
#: Three nodes out of the CPUs there are; a machine with one CPU has it in each.
THREE = {0: {CPUS[0]}, 1: {CPUS[-1]}, 2: {CPUS[0], CPUS[-1]}}


def listed(numbers) -> str:
    return ",".join(map(str, sorted(numbers)))


def say_who_shares(folder: Path, name: str, sets: Sequence[set[int]]) -> None:
    for shared in sets:
        for cpu in shared:
            file = folder / f"cpu{cpu}" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(listed(shared) + "\n")


@pytest.fixture
def fake_nodes(tmp_path, monkeypatch):
    """fake_nodes({0: {0}, 1: {1}}): from now on there are these nodes with these CPUs, which may be the same in several nodes.

    memory: the nodes that have some, all by default. allowed: those that the cpuset allows, all by default. usable: the CPUs
    of the affinity mask, this machine's own by default. distances: by node, in order. meminfo: the text of a node's, by node.
    cores, caches: CPUs that are one core, and that share an L3 cache; of the others the system does not say.
    """
    made = 0

    def fake(
        cpus: Mapping[int, set[int]],
        *,
        memory: set[int] | None = None,
        allowed: set[int] | None = None,
        usable: set[int] | None = None,
        distances: Mapping[int, list[int]] | None = None,
        meminfo: Mapping[int, str] | None = None,
        cores: Sequence[set[int]] = (),
        caches: Sequence[set[int]] = (),
    ):
        nonlocal made
        made += 1
        folder = tmp_path / f"system{made}"
        folder.mkdir()
        memory = set(cpus) if memory is None else memory
        (folder / "has_memory").write_text(listed(memory) + "\n")
        for node in cpus:
            own = folder / f"node{node}"
            own.mkdir()
            far = {node: [10 if other == node else 20 for other in sorted(cpus)]} | dict(distances or {})
            (own / "cpulist").write_text(listed(cpus[node]) + "\n")
            (own / "distance").write_text(" ".join(map(str, far[node])) + "\n")
            (own / "meminfo").write_text((meminfo or {}).get(node, ""))
        (folder / "status").write_text(f"Name:\tpython\nMems_allowed_list:\t{listed(memory if allowed is None else allowed)}\n")
        say_who_shares(folder, "topology/thread_siblings_list", cores)
        say_who_shares(folder, "cache/index3/shared_cpu_list", caches)
        monkeypatch.setattr(topology, "CPUS", folder)
        monkeypatch.setattr(numa, "NODES", folder)
        monkeypatch.setattr(numa, "STATUS", folder / "status")
        if usable is not None:
            monkeypatch.setattr(numa, "usable_cpus", lambda: set(usable))
        return folder

    return fake


@pytest.fixture
def three_nodes(fake_nodes):
    """Let there be three nodes from now on."""
    fake_nodes(THREE)


def masks():
    """The CPUs that each of this process's other threads may use."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) == threading.get_native_id():
            continue
        with suppress(OSError):  # it has just ended
            lines = (task / "status").read_text().splitlines()
            found.append(next(line.partition(":\t")[2] for line in lines if line.startswith("Cpus_allowed_list")))
    return found


def workers(count, before):
    """The masks of the threads that there are beside those of before, once there are so many: ended ones linger a moment."""
    for _ in range(500):
        started = masks()
        for mask in before:
            if mask in started:
                started.remove(mask)
        if len(started) == count:
            break
        time.sleep(0.01)
    return sorted(started)
