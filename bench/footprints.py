"""How much of a model is packed, so that its weights come from memory and fit into it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bench import machine
from bench.models import Model

#: A footprint so many times the last-level cache is no longer found there when its turn comes again.
CACHE_TIMES = 4
#: The most of the available memory that is packed at a time.
MEMORY_SHARE = 0.5
#: The bytes of a layer beyond which a model has fewer experts by default (or CACHE_TIMES caches, if that is more).
DEFAULT_BYTES = 4 << 30


@dataclass(frozen=True)
class Footprint:
    """What is packed to measure a model: so many experts in each of so many layers, whose calls take turns."""

    experts: int
    layers: int


def wanted_bytes() -> int:
    """What no cache holds."""
    return CACHE_TIMES * machine.last_cache_bytes()


def of_cache(nbytes: int) -> float:
    """Bytes as a multiple of the last-level cache."""
    return nbytes / machine.last_cache_bytes()


def footprint(model: Model, *, full: bool) -> Footprint:
    """The model's own number of experts where they fit, and as many layers as CACHE_TIMES caches take; fewer where memory ends.

    full: what fits is what memory allows; else it is DEFAULT_BYTES or CACHE_TIMES caches, whichever is more.
    """
    most = machine.usable_bytes(MEMORY_SHARE)
    if not full:
        most = min(most, max(wanted_bytes() + model.expert_bytes, DEFAULT_BYTES))
    experts = max(model.top_k, min(model.experts, most // model.expert_bytes))
    layer_bytes = experts * model.expert_bytes
    layers = max(1, min(model.layers, math.ceil(wanted_bytes() / layer_bytes), most // layer_bytes))
    return Footprint(experts, layers)
