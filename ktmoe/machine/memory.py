"""How much memory can still be had: asked before packing, so that the answer is an exception and not the OOM killer."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path

from ktmoe.errors import OutOfMemoryError
from ktmoe.machine import cgroup, numa
from ktmoe.machine.system_root import under

MEMINFO = Path("/proc/meminfo")
#: The files of a cgroup, by the interface's version: the limit, what is used of it, and memory.stat's names of pages of files,
#: which can go.
_CGROUP_FILES = {
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}


def available_bytes(root: Path | None = None) -> int | None:
    """Bytes available without swapping; None where nothing says.

    The least of MemAvailable, of what each cgroup's limit leaves, and, if the cpuset allows some nodes' memory only, of theirs.
    root: the folder that stands for /; None for this system's own.
    """
    candidates = [meminfo("MemAvailable", root), *(_left(*group) for group in cgroup.folders("memory", root))]
    present, allowed = numa.memory_nodes(root)
    if allowed < present:
        candidates.append(free_on(allowed, root))
    return min((candidate for candidate in candidates if candidate is not None), default=None)


def meminfo(name: str, root: Path | None = None) -> int | None:
    """A number of /proc/meminfo in bytes; None if it is not there."""
    return _kilobytes(under(root, MEMINFO), (f"{name}:",))


def limit_bytes(root: Path | None = None) -> int | None:
    """The least memory limit of this process's cgroups; None if none has one."""
    limits = []
    for version, folder in cgroup.folders("memory", root):
        try:
            limits.append(int((folder / _CGROUP_FILES[version][0]).read_text()))
        except (OSError, ValueError):  # absent, or "max"
            continue
    return min(limits, default=None)


def free_on(nodes: Iterable[int], root: Path | None = None) -> int | None:
    """Bytes that NUMA nodes have free or can free without swapping; None where they do not say."""
    free = 0
    for node in nodes:
        names = (f"Node {node} {name}:" for name in ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable"))
        of_node = _kilobytes(under(root, numa.NODES) / f"node{node}/meminfo", tuple(names))
        if of_node is None:
            return None
        free += of_node
    return free


def give_back() -> None:
    """Give the system what is free in the C library's heap: glibc keeps most tensors that were freed. A no-op elsewhere."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)


def require(nbytes: int, what: str) -> None:
    """Raise OutOfMemoryError if nbytes are not available."""
    available = available_bytes()
    if available is not None and nbytes > available:
        found = max(available, 0)
        raise OutOfMemoryError(f"{what} needs {nbytes / 2**30:.2f} GiB of memory, {found / 2**30:.2f} GiB is available")


def _left(version: int, folder: Path) -> int | None:
    """What a cgroup's limit leaves, pages of files that are charged to it included; None if it has none."""
    limit, used, file_pages = _CGROUP_FILES[version]
    try:
        left = int((folder / limit).read_text()) - int((folder / used).read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None
    return left + (_sum(folder / "memory.stat", file_pages) or 0)


def _kilobytes(file: Path, names: tuple[str, ...]) -> int | None:
    total = _sum(file, names)
    return None if total is None else total * 1024


def _sum(file: Path, names: tuple[str, ...]) -> int | None:
    """The sum of the numbers that follow these names at the beginnings of a file's lines; None if the first is not there."""
    found = {}
    try:
        for line in file.read_text().splitlines():
            for name in names:
                if line.startswith(name + " "):
                    found[name] = int(line[len(name) :].split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return sum(found.values()) if names[0] in found else None
