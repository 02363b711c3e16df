"""The texts that all ways read and write. Needs numpy alone, as some ways' processes have no torch."""

from __future__ import annotations

import numpy as np


def tokens(vocabulary: int, batch: int, count: int, seed: int) -> np.ndarray:
    """Random ones, int64 [batch, count]."""
    return np.random.default_rng(seed).integers(0, vocabulary, (batch, count))
