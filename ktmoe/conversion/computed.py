"""The check that a backend computes a format, before a checkpoint is written in it."""

from __future__ import annotations

import itertools

from ktmoe import backends
from ktmoe.backends.base import Found
from ktmoe.conversion.storage import storage
from ktmoe.errors import InputError
from ktmoe.experts import ExpertWeights
from ktmoe.quantization import Quantizer
from ktmoe.quantization.targets import Group

#: Groups that are tried where another one is refused.
_SIZES = (16, 32, 64, 128, 256)
_GROUPS: tuple[Group, ...] = ("row", "matrix", *_SIZES, *itertools.product(_SIZES, _SIZES))


def check_computed(quantizer: Quantizer, experts: ExpertWeights) -> None:
    """Raise InputError, which says which groups there are instead, if no backend computes experts that are rounded so."""
    if _computed(quantizer, experts):
        return
    scale = quantizer.format.scale
    kind = None if scale is None else scale.kind
    others = []
    for group in _GROUPS:
        try:
            other = Quantizer(quantizer.to, group=group, rule=quantizer.rule.name, scales=kind)
            storage(other.format)
        except InputError:
            continue
        if _computed(other, experts):
            others.append("x".join(map(str, group)) if isinstance(group, tuple) else str(group))
    raise InputError(
        f"{experts.name}: expected a format that a backend computes, found {quantizer.format.description}; groups that work: "
        f"{', '.join(others) or 'none'}"
    )


def _computed(quantizer: Quantizer, experts: ExpertWeights) -> bool:
    rounded = quantizer.experts(experts)
    return any(isinstance(backends.get(name).lookup(rounded), Found) for name in backends.ranked())
