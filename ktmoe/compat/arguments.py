"""Checks of arguments that several calls have: counts, whole numbers, sizes, NUMA nodes."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ktmoe.errors import InputError
from ktmoe.experts import SIZE_LIMIT
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


class Sizes(NamedTuple):
    """The number of a layer, and its sizes."""

    layer_idx: int
    num_experts: int
    num_experts_per_tok: int
    hidden_size: int
    moe_intermediate_size: int

    @classmethod
    def checked(cls, layer, experts, top_k, hidden, intermediate) -> Sizes:
        """Raises InputError."""
        sizes = cls(
            count("layer_idx", layer, 0),
            count("num_experts", experts, most=SIZE_LIMIT),
            count("num_experts_per_tok", top_k),
            count("hidden_size", hidden),
            count("moe_intermediate_size", intermediate),
        )
        if sizes.num_experts_per_tok > sizes.num_experts:
            raise InputError(f"num_experts_per_tok must be at most num_experts {experts}, found {top_k}")
        return sizes


def batch(hidden: int, x, ids, weights) -> tuple[int, int]:
    """(tokens, top_k) of a call's arguments. Raises InputError where their shapes do not fit."""
    shapes = [tuple(getattr(value, "shape", ())) for value in (x, ids, weights)]
    if len(shapes[0]) < 2 or shapes[0][-1] != hidden:
        raise InputError(f"hidden_states must have shape [tokens, {hidden}], found {list(shapes[0])}")
    tokens = int(np.prod(shapes[0][:-1]))
    for name, shape in (("topk_ids", shapes[1]), ("topk_weights", shapes[2])):
        if len(shape) != 2 or shape[0] != tokens or shape != shapes[1]:
            raise InputError(f"{name} must have shape [{tokens}, top_k], found {list(shape)}")
    return tokens, shapes[1][1]


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
