"""What Linux says about the CPU: /proc/cpuinfo, and its caches."""

from __future__ import annotations

from pathlib import Path

from ktmoe.machine.system_root import under

CPUINFO = Path("/proc/cpuinfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def cpuinfo(name: str, root: Path | None = None) -> str | None:
    """A field of /proc/cpuinfo, of the first CPU that has it; None if none has. root: what stands for /."""
    for line in under(root, CPUINFO).read_text().splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return None


def cache_sizes(folder: Path = _CACHES) -> dict[int, int]:
    """{level: bytes} of CPU 0's data caches; empty where the system does not say."""
    found = {}
    for index in folder.glob("index*"):
        if (index / "type").read_text().strip() != "Instruction":
            size = (index / "size").read_text().strip()
            found[int((index / "level").read_text())] = int(size.rstrip("KMG")) * _UNITS.get(size[-1], 1)
    return found
