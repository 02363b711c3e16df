"""Numbers as all commands print them: GB = 1e9 bytes, GB/s, GFLOP/s, tokens/s, ms, and shares in percent."""

from __future__ import annotations

import math


def number(value: float, digits: int = 4) -> str:
    """At least so many digits, and no exponent: 0.01234, 1.234, 12345."""
    if not math.isfinite(value):
        return "-"
    if not value:
        return "0"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def gb(nbytes: float) -> str:
    return f"{number(nbytes / 1e9, 3)} GB"


def gb_s(rate: float) -> str:
    """rate: bytes per second."""
    return f"{number(rate / 1e9, 3)} GB/s"


def gflop_s(rate: float) -> str:
    """rate: FLOPs per second."""
    return f"{number(rate / 1e9, 3)} GFLOP/s"


def tokens_s(rate: float) -> str:
    return f"{number(rate, 3)} tokens/s"


def ms(seconds: float) -> str:
    return f"{number(seconds * 1e3)} ms"


def percent(share: float) -> str:
    """Of a limit: 12%, 1.2%."""
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def limits(read: float, peak: float, isa: str) -> str:
    """What a machine allows. read: bytes per second. peak: FLOPs per second."""
    return f"reads {gb_s(read)}, multiplies {gflop_s(peak)} by kernels of {isa}"


def count(number: int, what: str) -> str:
    """1 layer, 2 layers."""
    return f"{number} {what}{'' if number == 1 else 's'}"
