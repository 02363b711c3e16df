"""The fastest that a model's layers can be here, by the machine's limits, for `ktmoe inspect`."""

from __future__ import annotations

from dataclasses import dataclass

from ktmoe.errors import OutOfMemoryError
from ktmoe.measuring.inspection import Inspection
from ktmoe.measuring.limits import Limits

#: Tokens of the calls whose speed is estimated.
CALLS = {"decode": 1, "prefill": 4096}


@dataclass(frozen=True)
class Estimate:
    """The fastest that a call of all layers can be. by: for each limit, the seconds of those layers that it bounds."""

    tokens: int
    seconds: float
    by: dict[str, float]

    @property
    def bound(self) -> str:
        return max(self.by, key=self.by.__getitem__)


@dataclass(frozen=True)
class Speed:
    """limits: by instruction set. calls: by CALLS' names, a pass through all layers; empty where it is not known, and why."""

    limits: dict[str, Limits]
    calls: dict[str, Estimate]
    why_not: str = ""

    @property
    def read(self) -> float | None:
        """Bytes per second that the memory gives, by the kernels that read fastest; None if none was measured."""
        return max((limits.read for limits in self.limits.values()), default=None)


def speed(found: Inspection) -> Speed:
    """Measure the machine's limits now, and estimate by them."""
    limits: dict[str, Limits] = {}
    try:
        for group in found.groups:
            if (isa := group.isa) and isa not in limits:
                limits[isa] = group.limits()
    except OutOfMemoryError as error:
        return Speed({}, {}, str(error))
    passed = [(group, count) for group in found.groups if (count := sum(map(found.counts, group.layers)))]
    if not passed:
        return Speed(limits, {}, "no layer that a token passes through is served")
    if found.top_k is None:
        return Speed(limits, {}, found.why_no_top_k)
    served = []
    for group, count in passed:
        isa = group.isa
        if isa is None:
            return Speed(limits, {}, group.why_no_isa)
        served.append((group, count, limits[isa]))
    calls = {}
    for name, tokens in CALLS.items():
        by: dict[str, float] = {}
        for group, count, of_isa in served:
            seconds, bound = of_isa.seconds(group.experts, group.packed_nbytes, tokens, found.top_k)
            by[bound] = by.get(bound, 0.0) + count * seconds
        calls[name] = Estimate(tokens, sum(by.values()), by)
    return Speed(limits, calls)
