"""How far some outputs are from others of the same inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Difference:
    """||y - y_exact|| / ||y_exact||: of all tokens at once, and the largest of one token."""

    relative: float
    largest: float

    @classmethod
    def of(cls, y: np.ndarray, exact: np.ndarray) -> Difference:
        """[tokens, hidden]. A token whose exact outputs are all 0 does not count."""
        y, exact = y.astype(np.float64), exact.astype(np.float64)
        off, size = np.linalg.norm(y - exact, axis=1), np.linalg.norm(exact, axis=1)
        off, size = off[size > 0], size[size > 0]
        if not len(size):
            return cls(math.nan, math.nan)
        return cls(float(np.linalg.norm(off) / np.linalg.norm(size)), float((off / size).max()))
