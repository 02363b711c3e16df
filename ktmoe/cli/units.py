"""Numbers as all commands print them: GB = 1e9 bytes, GB/s, GFLOP/s, tokens/s, ms, and shares in percent; and the machine."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ktmoe.machine import threads
from ktmoe.measuring.limits import Limits


def number(value: float, digits: int = 4) -> str:
    """A number with at least so many digits, and no exponent: 0.01234, 1.234, 12345."""
    if not math.isfinite(value):
        return "-"
    if not value:
        return "0"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def gb(nbytes: float) -> str:
    return f"{number(nbytes / 1e9, 3)} GB"


def some(names: list[str]) -> str:
    """The first three names, and how many others there are."""
    others = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{others}"


def gb_s(rate: float) -> str:
    """A rate of bytes per second as text."""
    return f"{number(rate / 1e9, 3)} GB/s"


def gflop_s(rate: float) -> str:
    """A rate of FLOPs per second as text."""
    return f"{number(rate / 1e9, 3)} GFLOP/s"


def tokens_s(rate: float) -> str:
    return f"{number(rate, 3)} tokens/s"


def ms(seconds: float) -> str:
    return f"{number(seconds * 1e3)} ms"


def percent(share: float) -> str:
    """A share of a limit as text: 12%, 1.2%."""
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def count(things: int, what: str) -> str:
    """A number of things as text: 1 layer, 2 layers."""
    return f"{things} {what}{'' if things == 1 else 's'}"


def machine(limits: Iterable[Limits]) -> list[str]:
    """Lines of text: this machine, and each instruction set's limits."""
    lines = [f"  reads {gb_s(x.read)}, multiplies {gflop_s(x.peak)} by kernels of {x.isa}" for x in limits]
    return [f"this machine: {threads.cpu_name()}, {count(threads.get_num_threads(), 'thread')}", *lines]


def limits_data(limits: Iterable[Limits]) -> list[dict]:
    """Each instruction set's limits, for JSON."""
    return [{"isa": x.isa, "read_gb_s": x.read / 1e9, "multiply_gflop_s": x.peak / 1e9} for x in limits]
