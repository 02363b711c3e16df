"""Checks of arguments that several calls have: counts, whole numbers, NUMA nodes."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence

from ktmoe.errors import InputError
from ktmoe.machine import numa
from ktmoe.messages import show


def count(name: str, value, least: int = 1, most: int = sys.maxsize) -> int:
    """The value as an int from least to most. Raises InputError, which has the name."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if not least <= number <= most:
        upwards = f"{least} or more" if most == sys.maxsize else f"from {least} to {most}"
        raise InputError(f"{name} must be a whole number, {upwards}, found {show(value)}")
    return number


def whole(name: str, value) -> int:
    """The value as an int. Raises InputError, which has the name."""
    try:
        return operator.index(value)
    except TypeError:
        raise InputError(f"{name} must be a whole number, found {show(value)}") from None


def nodes(parts: int, wanted: Sequence[int] | None) -> list[int] | None:
    """NUMA nodes for MoELayer, None for its default, all. A count above the number of nodes means all of them."""
    there = sorted(numa.nodes())
    if wanted is None:
        return there[:parts] if parts < len(there) else None
    if len(wanted) != parts:
        raise InputError(f"numa_nodes must have threadpool_count = {parts} entries, found {list(wanted)}")
    if len(wanted) > len(there):
        wanted = [node for node in wanted if node in there]
        return wanted if len(there) > 1 and wanted else None
    return list(wanted)
