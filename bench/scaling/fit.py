"""Finds each backend's three numbers by its measured points, and predicts the others with them."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np

from bench import cost_model
from bench.cost_model import Kernel, Machine
from bench.models import Model
from bench.scaling.points import CHECKS, FITS, KERNELS, SHAPES, Measured, Point

#: What is searched for the three numbers.
RANGES = {"decode_cycles": (0.0, 1.0), "efficiency": (0.1, 1.2), "overlap": (0.0, 1.0)}


def fit(base: Kernel, samples: list[tuple[Model, int, Machine, float]]) -> Kernel:
    """The kernel whose predictions are nearest to measured (shape, tokens, machine, seconds), in squares of logarithms.

    A grid that narrows around its best point, since the predictions have kinks.
    """

    def error(kernel: Kernel) -> float:
        return sum(math.log(cost_model.seconds(s, t, kernel, m) / took) ** 2 for s, t, m, took in samples)

    best = base
    width = {name: (high - low) / 2 for name, (low, high) in RANGES.items()}
    middle = {name: (high + low) / 2 for name, (low, high) in RANGES.items()}
    for _ in range(24):
        values = [
            np.unique(np.clip(middle[name] + width[name] * np.linspace(-1, 1, 5), low, high)).tolist()
            for name, (low, high) in RANGES.items()
        ]
        tried = [replace(base, **dict(zip(RANGES, point, strict=True))) for point in itertools.product(*values)]
        best = min(tried, key=error)
        middle = {name: getattr(best, name) for name in RANGES}
        width = {name: w * 0.75 for name, w in width.items()}
    return best


@dataclass(frozen=True)
class Row:
    """A point, what was predicted for it, and whether the numbers were found with it."""

    point: Point
    predicted: float
    fitted: bool

    @property
    def ratio(self) -> float:
        return self.predicted / self.point.seconds


def fits(measured: Measured) -> dict[str, Kernel]:
    """Each measured backend's numbers."""
    found = {}
    for backend, (base, _) in KERNELS.items():
        points = [p for p in measured.points if p.backend == backend and p.case in FITS]
        if points:
            samples = [(SHAPES[p.shape], p.tokens, p.machine(measured.call), p.seconds) for p in points]
            found[backend] = fit(base, samples)
    return found


def compare(measured: Measured, kernels: dict[str, Kernel]) -> list[Row]:
    """All points beside their predictions, each with the machine's limits of the same rounds."""
    order = {case: number for number, case in enumerate(FITS + CHECKS)}
    points = sorted((p for p in measured.points if p.case in order and p.backend in kernels), key=lambda p: order[p.case])
    return [
        Row(p, cost_model.seconds(SHAPES[p.shape], p.tokens, kernels[p.backend], p.machine(measured.call)), p.case in FITS)
        for p in points
    ]
