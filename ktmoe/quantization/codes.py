"""The second half of a rule: weights and the steps of their groups become codes. The loops are in _native/quantize."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ktmoe.quantization.rules import Rule
from ktmoe.quantization.steps import ONE, Steps
from ktmoe.weights.elements import E2M1, E4M3, Element


@dataclass(frozen=True)
class Rounding:
    """How weights become codes, as the native code has it (_native/quantize/round.h). Arrays are those of groups.

    multipliers, points: float32, or None. divisors: float32. values: float64. limits: of E2M1's codes 1 to 7, float32.
    """

    to: str
    ties: str
    quotient: str
    extent: tuple[int, int]
    multipliers: np.ndarray | None
    divisors: np.ndarray
    points: np.ndarray | None
    values: np.ndarray
    least: int
    most: int
    code_bits: int
    plus: int
    negative_zero: bool
    zero_signed: bool
    limits: np.ndarray


def rounding(rule: Rule, steps: Steps, element: Element, extent: tuple[int, int]) -> Rounding:
    """How native code rounds by a rule, with the steps of a matrix's groups."""
    multipliers, divisors = _quotients(steps, rule.quotient)
    least, most = rule.codes or (0, 0)
    return Rounding(
        to={E2M1: "E2M1", E4M3: "E4M3"}.get(element, "integers"),
        ties=rule.ties,
        quotient=rule.quotient,
        extent=extent,
        multipliers=multipliers,
        divisors=np.ascontiguousarray(divisors, np.float32),
        points=None if steps.points is None else np.ascontiguousarray(steps.points, np.float32),
        values=np.ascontiguousarray(steps.values),
        least=least,
        most=most,
        code_bits=element.bits,
        plus=8 if element.bits == 4 else 0,
        negative_zero=rule.negative_zero,
        zero_signed=rule.zero_signed,
        limits=limits(rule.ties),
    )


def limits(ties: str) -> np.ndarray:
    """The least quotient of each of E2M1's codes 1 to 7: half-way between two values, or the float32 number after that where a
    tie goes to the smaller one."""
    sizes = np.array(E2M1.values[:8], np.float32)
    middles = (sizes[:-1] + sizes[1:]) / 2
    codes = np.arange(1, 8)
    up = {"even": codes % 2 == 0, "away": codes > 0, "zero": codes < 0}[ties]
    return np.where(up, middles, np.nextafter(middles, np.float32(np.inf)))


def _quotients(steps: Steps, how: str) -> tuple[np.ndarray | None, np.ndarray]:
    """(what weights are multiplied by, what the product is divided by). An inverse that is not finite divides instead."""
    divisors = steps.divisors
    if steps.inverses is not None:
        return steps.inverses, np.ones_like(divisors)
    if how in ("divided", "float64"):
        return None, divisors
    divisors = divisors / np.float32(16) if how == "sixteenths" else divisors
    with np.errstate(over="ignore", divide="ignore"):
        inverse = ONE / divisors
    good = np.isfinite(inverse)
    return np.where(good, inverse, ONE), np.where(good, ONE, divisors)
