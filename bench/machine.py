"""What the machine is, as far as a figure depends on it: its caches, its memory, its CPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import ktmoe
from ktmoe._native import core
from ktmoe.machine import cpu, memory, threads

#: Where the system does not say.
ASSUMED_CACHES = {2: 1 << 20, 3: 256 << 20}


def cache_sizes(folder: Path | None = None) -> dict[int, int]:
    """{level: bytes} of CPU 0's data caches, as the operating system reports them; what it does not report is assumed."""
    return (cpu.cache_sizes(folder) if folder else cpu.cache_sizes()) or dict(ASSUMED_CACHES)


def l2_bytes() -> int:
    """Bytes of a core's second-level cache."""
    return cache_sizes().get(2, ASSUMED_CACHES[2])


def last_cache_bytes() -> int:
    """Bytes of the last-level cache."""
    sizes = cache_sizes()
    return sizes[max(sizes)]


def usable_bytes(share: float) -> int:
    """A share of the memory that can be had; all that can be addressed where the system does not say."""
    available = memory.available_bytes()
    return sys.maxsize if available is None else max(0, int(share * available))


def description() -> dict:
    """Recorded with every point: what has to be alike for two figures to compare."""
    return {"cpu": threads.cpu_name(), "threads": ktmoe.get_num_threads()}


def about() -> dict:
    """Recorded with every run, for bench/results: what measured, and on what."""
    return {
        "version": ktmoe.__version__,
        "compiler": compiler(Path(core.__file__).read_bytes()),
        "machine": {
            "features": [name for name, present in core.cpu_features().items() if present],
            "threads": ktmoe.get_num_threads(),
            "l2_bytes": l2_bytes(),
            "llc_bytes": last_cache_bytes(),
        },
    }


def cpu_fields() -> dict:
    """A results file's `cpu`."""
    numbers = {"family": "cpu family", "model": "model", "stepping": "stepping"}
    found = {name: cpu.cpuinfo(field) or "" for name, field in numbers.items()}
    known = {name: int(text) for name, text in found.items() if text.isdecimal()}
    return {"name": threads.cpu_name(), "family": 0, "model": 0, **known, **about()["machine"]}


def compiler(native: bytes) -> str:
    """What built a native module, as GCC and clang write it into what they build; empty where neither did."""
    found = re.search(rb"GCC: \([^)\0]*\) [\d.]+|clang version [\d.]+", native)
    return re.sub(r": \(.*\)", "", found[0].decode()) if found else ""


def commit() -> str:
    """What git has checked out here, and whether something is uncommitted; empty where there is no git."""
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=9", "--dirty=, with uncommitted changes"]
    try:
        return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
