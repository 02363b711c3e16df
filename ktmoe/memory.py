"""How much memory can still be had: asked before packing, so that the answer is an exception and not the OOM killer."""

from __future__ import annotations

from pathlib import Path

from ktmoe.errors import OutOfMemoryError


def available_bytes() -> int | None:
    """Bytes available without swapping: MemAvailable, and the cgroup's limit less its use; None where nothing says."""
    candidates = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                candidates.append(int(line.split()[1]) * 1024)
    except OSError:
        pass
    for limit, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        root = Path("/sys/fs/cgroup")
        try:
            candidates.append(int((root / limit).read_text()) - int((root / used).read_text()))
        except (OSError, ValueError):  # absent, or "max"
            continue
    return min(candidates, default=None)


def require(nbytes: int, what: str) -> None:
    """Raise OutOfMemoryError if nbytes are not available."""
    available = available_bytes()
    if available is not None and nbytes > available:
        found = max(available, 0)
        raise OutOfMemoryError(f"{what} needs {nbytes / 2**30:.2f} GiB of memory, {found / 2**30:.2f} GiB is available")
