"""What weights can be rounded to, by name: the formats, and which groups share a scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ktmoe.errors import InputError
from ktmoe.messages import show
from ktmoe.weights.formats import FP8_PER_MATRIX, FP8_PER_ROW, MXFP4, MXFP8, WeightFormat, fp8, int4, int8, nvfp4, uint4

#: Columns that share a scale, or (rows, columns), or "row", or "matrix".
Group = int | tuple[int, int] | str
#: The kinds of scales, where there is a choice.
KINDS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Target:
    """group: what shares a scale where nobody says. kind: of scales, likewise; None: there is no choice.

    format: (group, kind, whether there are zero points, whether a factor divides) -> WeightFormat. Raises InputError for a
    group that there is not.
    """

    group: Group
    kind: str | None
    format: Callable[[Group, str, bool, bool], WeightFormat]


def _only(group: Group, made: Callable[[bool], WeightFormat]) -> Target:
    def format(wanted: Group, _kind: str, _points: bool, divides: bool) -> WeightFormat:
        if wanted != group:
            raise InputError(f"group must be {group}, found {show(wanted)}")
        return made(divides)

    return Target(group, None, format)


def _fp8(group: Group, kind: str, _points: bool, _divides: bool) -> WeightFormat:
    if group == "row":
        return FP8_PER_ROW
    if group == "matrix":
        return FP8_PER_MATRIX
    return fp8(kind, _extent(group, "'row', 'matrix', "))


def _int8(group: Group, kind: str, _points: bool, _divides: bool) -> WeightFormat:
    if group == "row":
        return int8()
    rows, columns = _extent(group, "'row', ")
    return int8(columns, kind, rows=rows)


def _int4(group: Group, kind: str, points: bool, _divides: bool) -> WeightFormat:
    if group == "row" and points:
        raise InputError("zero points are of groups of columns: group must be a number of columns, found 'row'")
    if group == "row":
        return int4()
    rows, columns = _extent(group, "'row', ")
    if rows != 1:
        raise InputError(f"group must be columns of one row, found {show(group)}")
    return uint4(columns, kind) if points else int4(columns, kind)


def _extent(group: Group, names: str) -> tuple[int, int]:
    """names: of the groups that have one, for the message."""
    extent = (1, group) if isinstance(group, int) else group
    if not (isinstance(extent, tuple) and len(extent) == 2 and all(isinstance(size, int) and size > 0 for size in extent)):
        raise InputError(f"group must be {names}a number of columns or (rows, columns), found {show(group)}")
    return extent


TARGETS = {
    "mxfp4": _only(32, lambda divides: MXFP4),
    "nvfp4": _only(16, nvfp4),
    "mxfp8": _only(32, lambda divides: MXFP8),
    "fp8": Target((128, 128), "fp32", _fp8),
    "int8": Target("row", "bf16", _int8),
    "int4": Target(32, "bf16", _int4),
}
