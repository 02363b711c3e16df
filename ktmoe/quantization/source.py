"""What is rounded: the real numbers that a matrix stands for, each rounded to float32 once."""

from __future__ import annotations

import numpy as np

from ktmoe import reference_weights
from ktmoe.errors import FormatError
from ktmoe.experts import Matrix


def read(matrix: Matrix) -> np.ndarray:
    """float32 [n, k]. Raises FormatError for a weight that is not finite, or leaves float32."""
    with np.errstate(over="ignore"):
        weights = reference_weights.dequantize(matrix).astype(np.float32)
    if not np.isfinite(weights).all():
        place = np.argwhere(~np.isfinite(weights))[0].tolist()
        raise FormatError(f"{matrix.name}: weight {place} is too large for float32")
    return weights
