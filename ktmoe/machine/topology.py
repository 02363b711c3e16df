"""Which logical CPUs are one physical core, and which share an L3 cache."""

from __future__ import annotations

from collections.abc import Set
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from ktmoe.machine.number_lists import listed
from ktmoe.machine.system_root import under

#: The folder in which Linux says what CPUs share; tests put a folder of their own here.
CPUS = Path("/sys/devices/system/cpu")


class Domain(NamedTuple):
    """CPUs that share an L3 cache, as far as they were asked for. The driver keeps threads together within one."""

    cpus: frozenset[int]
    #: One CPU of each physical core.
    one_a_core: frozenset[int]


def cores(cpus: Set[int], root: Path | None = None) -> list[frozenset[int]]:
    """The CPUs by physical core; each is a core where the system does not say which are siblings. root: what stands for /."""
    return list(_sharing(under(root, CPUS), frozenset(cpus), "topology/thread_siblings_list", one=False))


def domains(cpus: Set[int]) -> tuple[Domain, ...]:
    """The CPUs by L3 cache; one domain where the system does not say. Caches that only one core uses count as one."""
    found = [cores(shared) for shared in _sharing(CPUS, frozenset(cpus), "cache/index3/shared_cpu_list", one=True)]
    alone = [own for own in found if len(own) == 1]
    if len(alone) > 1:
        found = [own for own in found if len(own) > 1] + [[core for own in alone for core in own]]
    return tuple(Domain(frozenset().union(*own), frozenset(map(min, own))) for own in found)


@lru_cache(maxsize=1024)  # a file of each CPU is read; a process has few sets of CPUs, but asks for each layer
def _sharing(folder: Path, cpus: frozenset[int], file: str, *, one: bool) -> tuple[frozenset[int], ...]:
    """The CPUs, cut by what a file of each says that it shares something with. one: of all where there is no such file."""
    left, found = set(cpus), []
    while left:
        cpu = min(left)
        shared = left & ((listed(folder / f"cpu{cpu}" / file) or (cpus if one else frozenset())) | {cpu})
        found.append(frozenset(shared))
        left -= shared
    return tuple(found)
