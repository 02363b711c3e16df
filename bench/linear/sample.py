"""Whether a call's outputs are right: some rows and columns of each matrix against float64, within the derived bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ktmoe import reference
from ktmoe.matrix import Matrix
from ktmoe.reference import Reference

COLUMNS = 64
#: Rows that are compared, where there are as many.
ROWS = 2


@dataclass(frozen=True)
class Sample:
    """rows: which of the call. columns, expected: of each matrix, in order; expected is of outputs in float32."""

    rows: list[int]
    columns: list[list[int]]
    expected: list[Reference]

    def of(self, outputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The sample of a whole call's outputs [rows, n]."""
        return [y[np.ix_(self.rows, columns)] for y, columns in zip(outputs, self.columns, strict=True)]

    def error(self, found: Sequence[np.ndarray]) -> float:
        """|y - float64| / |float64| of a sample's outputs, as norms."""
        pairs = [(y.astype(np.float64), expected.y) for y, expected in zip(found, self.expected, strict=True)]
        error = np.linalg.norm(np.concatenate([(y - wanted).ravel() for y, wanted in pairs]))
        error /= np.linalg.norm(np.concatenate([wanted.ravel() for _, wanted in pairs]))
        return float(error) if np.isfinite(error) else float("inf")

    def of_bound(self, found: Sequence[np.ndarray], *, rounded: bool) -> float:
        """The largest error as a share of ktmoe's bound: above 1 is wrong. rounded: to bfloat16, as y in x's dtype is."""
        pairs = zip(found, self.expected, strict=True)
        return max((_rounded(expected) if rounded else expected).worst(y) for y, expected in pairs)

    @property
    def bound(self) -> float:
        """The median bound as a share of the outputs' rms."""
        y, bounds = (np.concatenate([getattr(each, name).ravel() for each in self.expected]) for name in ("y", "bound"))
        return float(np.median(bounds) / np.sqrt(np.mean(np.square(y))))


def sample(dispatches: Sequence[Sequence[Matrix]], xs: Sequence[np.ndarray], inputs: str) -> Sample:
    """xs: bits of bfloat16, as Call.x() has them. The outputs are those of the exact mode, bf16."""
    count = len(xs[0])
    random = np.random.default_rng(count)
    rows = np.sort(random.choice(count, min(count, ROWS), replace=False))
    columns, expected = [], []
    for matrices, x in zip(dispatches, xs, strict=True):
        for number, matrix in enumerate(matrices):
            mine = (x[rows, number] if inputs == "own" else x[rows]).view(ml_dtypes.bfloat16).astype(np.float64)
            chosen = np.sort(random.choice(matrix.shape[0], min(matrix.shape[0], COLUMNS), replace=False))
            with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
                a, eps_a = reference.operand(mine, mine, mine, "bf16")
                expected.append(Reference(*reference.linear(matrix, a, eps_a, rows=chosen)))
            columns.append(chosen.tolist())
    return Sample(rows.tolist(), columns, expected)


def _rounded(expected: Reference) -> Reference:
    y, eps = expected.y, expected.bound
    up, down = (reference.round_bfloat16(v) for v in (y + eps, y - eps))
    return Reference(y, np.maximum(up - y, y - down))
