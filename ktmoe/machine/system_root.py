"""The files of /proc and /sys of this system, or of a folder that stands for its root."""

from __future__ import annotations

from pathlib import Path


def under(root: Path | None, file: Path) -> Path:
    """Where a file of the system is. root: the folder that stands for /, if it is not this system's own."""
    return file if root is None else root / file.relative_to("/")
