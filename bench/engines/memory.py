"""What this process has in memory."""

from __future__ import annotations

import re
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak() -> None:
    CLEAR.write_text("5")


def peak() -> int:
    """Bytes of memory that were resident at once, at most, since reset_peak()."""
    return _field("VmHWM")


def resident() -> int:
    """Bytes that are resident now, pages of mapped files among them."""
    return _field("VmRSS")


def mapped() -> int:
    """Those of mapped files, which the system can take back."""
    return _field("RssFile")


def _field(name: str) -> int:
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", STATUS.read_text())[1])
