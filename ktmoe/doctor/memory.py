"""Memory: how much, in which pages, and what Linux does with it meanwhile."""

from __future__ import annotations

import re
from pathlib import Path

from ktmoe.doctor.diagnosis import BETTER, GOOD, WRONG, Diagnosis, DoctorCheck, first_line, unreadable
from ktmoe.machine import memory, numa
from ktmoe.machine.number_lists import ranges

_HUGE = "sys/kernel/mm/transparent_hugepage"
_BALANCING = "proc/sys/kernel/numa_balancing"
#: Bytes without which hardly any model's layer can be packed.
LEAST = 1e9
#: The share of the memory that may be swapped out before it matters.
_MOST_SWAPPED = 0.05


def free(root: Path) -> Diagnosis:
    """What can be had without swapping."""
    available, total = memory.available_bytes(root), memory.meminfo("MemTotal", root)
    if available is None:
        return unreadable(root, "proc/meminfo")
    of = "" if total is None else f" of {_gb(total)}"
    found = f"{_gb(max(0, available))}{of} is available"
    if available < LEAST:
        return Diagnosis(WRONG, found, "top -o %MEM    # which programs have the memory")
    return Diagnosis(GOOD, found)


def limit(root: Path) -> Diagnosis:
    """The control groups' limit beside the machine's memory."""
    total, least = memory.meminfo("MemTotal", root), memory.limit_bytes(root)
    if total is None:
        return unreadable(root, "proc/meminfo")
    if least is None or least >= total:
        return Diagnosis(GOOD, "no control group limits the memory")
    found = f"the control group allows {_gb(least)} of the machine's {_gb(total)}"
    return Diagnosis(BETTER, found, "docker run --memory SIZE    # or systemctl set-property UNIT MemoryMax=SIZE")


def huge_pages(root: Path) -> Diagnosis:
    """Whether the packed weights can lie in pages of 2 MiB, which ktmoe asks for by madvise."""
    enabled, defrag = (_chosen(root / _HUGE / name) for name in ("enabled", "defrag"))
    if enabled is None:
        return unreadable(root, f"{_HUGE}/enabled")
    if enabled == "never":
        return Diagnosis(BETTER, "Linux gives no huge pages", f"echo madvise | sudo tee /{_HUGE}/enabled")
    if defrag == "never":
        found = "Linux gives huge pages only where free memory happens to be in one piece (defrag is never)"
        return Diagnosis(BETTER, found, f"echo madvise | sudo tee /{_HUGE}/defrag")
    return Diagnosis(GOOD, f"Linux gives huge pages: enabled is {enabled}, defrag {defrag or 'not known'}")


def swap(root: Path) -> Diagnosis:
    """How much is swapped out."""
    total, size, left = (memory.meminfo(name, root) for name in ("MemTotal", "SwapTotal", "SwapFree"))
    if total is None or size is None or left is None:
        return unreadable(root, "proc/meminfo")
    if not size:
        return Diagnosis(GOOD, "there is no swap")
    found = f"{_gb(size - left)} of {_gb(size)} of swap is used"
    if size - left > _MOST_SWAPPED * total:
        return Diagnosis(BETTER, found, "sudo swapoff -a && sudo swapon -a    # first end programs, if memory is short")
    return Diagnosis(GOOD, found)


def balancing(root: Path) -> Diagnosis:
    """NUMA balancing, where there are several nodes."""
    nodes = numa.memory_nodes(root)[0]
    if len(nodes) < 2:
        return Diagnosis(GOOD, "there is one node" if nodes else "Linux names no nodes")
    mode = first_line(root, _BALANCING)
    if mode is None:
        return Diagnosis(GOOD, f"this Linux has no NUMA balancing; nodes {ranges(nodes)}")
    if int(mode):
        found = f"NUMA balancing is on, and there are nodes {ranges(nodes)}"
        return Diagnosis(BETTER, found, f"echo 0 | sudo tee /{_BALANCING}")
    return Diagnosis(GOOD, f"NUMA balancing is off; nodes {ranges(nodes)}")


def _chosen(file: Path) -> str | None:
    """The word in brackets, as in "always [madvise] never"; None where there is none."""
    found = re.search(r"\[([\w+]+)\]", first_line(file.parent, file.name) or "")
    return found[1] if found else None


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB"


CHECKS = (
    DoctorCheck("free memory", "Packed weights must be in memory; a model that does not fit is refused.", free),
    DoctorCheck("memory limit", "A model that needs more than the limit is refused, whatever the machine has.", limit),
    DoctorCheck(
        "huge pages", "With pages of 4 KiB the CPU looks up addresses more often, and reads weights more slowly.", huge_pages
    ),
    DoctorCheck("swap", "Weights that were swapped out are read from the disk again, in the middle of a call.", swap),
    DoctorCheck(
        "NUMA balancing",
        "Linux then takes pages away for a moment, to see which node uses them; weights that ktmoe has bound to nodes stay.",
        balancing,
    ),
)
