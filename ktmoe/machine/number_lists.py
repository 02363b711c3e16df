"""Lists of numbers as Linux writes them: "0-3,8"."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def numbers(text: str) -> frozenset[int]:
    found: set[int] = set()
    for item in filter(None, text.strip().split(",")):
        first, dash, last = item.partition("-")
        found.update(range(int(first), int(last if dash else first) + 1))
    return frozenset(found)


def listed(file: Path) -> frozenset[int]:
    """What a file says; none if there is no such file."""
    try:
        return numbers(file.read_text())
    except (OSError, ValueError):
        return frozenset()


def ranges(of: Iterable[int]) -> str:
    """The inverse of numbers()."""
    runs: list[list[int]] = []
    for number in sorted(of):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
