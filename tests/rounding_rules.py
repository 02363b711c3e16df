"""What _native/quantize does, in numpy: weights and the steps of their groups become codes."""

from __future__ import annotations

import numpy as np

from ktmoe.quantization.rules import Rule
from ktmoe.quantization.steps import Steps
from ktmoe.weights.elements import Element


def extremes(weights: np.ndarray, extent: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) of each group, float32."""
    rows, columns = (np.arange(0, size, step) for size, step in zip(weights.shape, extent, strict=True))

    def over(least_or_most: np.ufunc) -> np.ndarray:
        return least_or_most.reduceat(least_or_most.reduceat(weights, columns, axis=1), rows, axis=0)

    return over(np.minimum), over(np.maximum)


def rounded(
    weights: np.ndarray, extent: tuple[int, int], steps: Steps, rule: Rule, element: Element
) -> tuple[np.ndarray, float, float]:
    """(codes as rows, sum of squares of the error, of the weights)."""
    n, k = weights.shape

    def spread(of_groups: np.ndarray) -> np.ndarray:
        return np.repeat(np.repeat(of_groups, extent[0], axis=0)[:n], extent[1], axis=1)[:, :k]

    if steps.inverses is None:
        t = _quotients(weights, spread(steps.divisors), rule.quotient)
    else:
        t = weights * spread(steps.inverses)
    if rule.codes is not None:
        points = 0 if steps.points is None else spread(steps.points)
        numbers = np.clip(_whole((t + points).astype(t.dtype), rule.ties), *rule.codes)
        codes = numbers.astype(np.int8).view(np.uint8)
        if element.bits == 4:
            codes = codes + np.uint8(8)
        numbers = numbers - points
    else:
        codes, numbers = _nearest(t, rule, element)
    exact = weights.astype(np.float64)
    error = exact - numbers * spread(steps.values)
    if element.bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    return np.ascontiguousarray(codes), float((error**2).sum()), float((exact**2).sum())


def _quotients(weights: np.ndarray, divisors: np.ndarray, how: str) -> np.ndarray:
    if how == "divided":
        return weights / divisors
    if how == "float64":
        return weights.astype(np.float64) / divisors
    of = divisors / np.float32(16) if how == "sixteenths" else divisors
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        inverse = np.float32(1) / of
        quotients = np.where(np.isfinite(inverse), weights * inverse, weights / of.astype(np.float64))
    quotients = quotients.astype(np.float32)
    return np.rint(quotients) / np.float32(16) if how == "sixteenths" else quotients


def _whole(numbers: np.ndarray, ties: str) -> np.ndarray:
    if ties == "even":
        return np.rint(numbers)
    return np.copysign(np.floor(np.abs(numbers).astype(np.float64) + 0.5), numbers)


def _nearest(numbers: np.ndarray, rule: Rule, element: Element) -> tuple[np.ndarray, np.ndarray]:
    """(codes, what they stand for) of an element whose highest bit is a sign and whose values ascend otherwise."""
    half = len(element.values) // 2
    values = np.array([value for value in element.values[:half] if value is not None])
    middles = (values[:-1] + values[1:]) / 2
    size = np.abs(numbers).astype(np.float64)
    codes = np.searchsorted(middles, size, side="left")  # of two that are as near: the smaller
    tie = (codes < len(middles)) & (size == middles[np.minimum(codes, len(middles) - 1)])
    if rule.ties != "zero":
        codes = codes + (tie & ((codes % 2 == 1) | (rule.ties == "away")))
    negative = np.signbit(numbers) & ((codes > 0) | rule.negative_zero) & ((numbers < 0) | rule.zero_signed)
    return (codes + half * negative).astype(np.uint8), np.copysign(values[codes], numbers)
