"""What the machine is, as far as a figure depends on it: its caches, its memory, its CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import ktmoe
from ktmoe.machine import memory, threads

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
#: Where the system does not say.
ASSUMED_CACHES = {2: 1 << 20, 3: 256 << 20}


def cache_sizes(folder: Path = _CACHES) -> dict[int, int]:
    """{level: bytes} of CPU 0's data caches, as the operating system reports them; what it does not report is assumed."""
    found = {}
    for index in folder.glob("index*"):
        if (index / "type").read_text().strip() != "Instruction":
            size = (index / "size").read_text().strip()
            found[int((index / "level").read_text())] = int(size.rstrip("KMG")) * _UNITS.get(size[-1], 1)
    return found or dict(ASSUMED_CACHES)


def l2_bytes() -> int:
    """Bytes of a core's second-level cache."""
    return cache_sizes().get(2, ASSUMED_CACHES[2])


def last_cache_bytes() -> int:
    """Bytes of the last-level cache."""
    sizes = cache_sizes()
    return sizes[max(sizes)]


def usable_bytes(share: float) -> int:
    """That share of the memory that can be had; all that can be addressed where the system does not say."""
    available = memory.available_bytes()
    return sys.maxsize if available is None else max(0, int(share * available))


def description() -> dict:
    """Recorded with every point: what has to be alike for two figures to compare."""
    return {"cpu": threads.cpu_name(), "threads": ktmoe.get_num_threads()}
