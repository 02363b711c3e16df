"""What a step of training is given: its inputs and its adapters. Needs numpy alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

ALPHA = 32.0


@dataclass(frozen=True)
class Inputs:
    """Steps of one size. x, grad_y: bfloat16 bits, uint16 [tokens, hidden]; ids int64 and weights float32:
    [batches, tokens, top_k]."""

    x: np.ndarray
    grad_y: np.ndarray
    ids: np.ndarray
    weights: np.ndarray

    @property
    def tokens(self) -> int:
        return len(self.x)

    def save(self, file: Path) -> None:
        np.savez(file, x=self.x, grad_y=self.grad_y, ids=self.ids, weights=self.weights)

    @classmethod
    def load(cls, file: Path) -> Inputs:
        with np.load(file) as arrays:
            return cls(arrays["x"], arrays["grad_y"], arrays["ids"], arrays["weights"])


def adapter(sizes, rank: int, projection: str, expert: int) -> tuple[np.ndarray, np.ndarray]:
    """An expert's (A [rank, inputs], B [outputs, rank]), float32 whose numbers are bfloat16's. ALPHA / rank scales them.

    sizes: whatever has `hidden` and `intermediate`.
    """
    inputs, outputs = sizes.hidden, sizes.intermediate
    if projection == "down":
        inputs, outputs = outputs, inputs
    rng = np.random.default_rng((("gate", "up", "down").index(projection), expert))
    return _in_bfloat16(rng, (rank, inputs), inputs**-0.5), _in_bfloat16(rng, (outputs, rank), 0.02)


def _in_bfloat16(rng: np.random.Generator, shape: tuple[int, int], size: float) -> np.ndarray:
    numbers = rng.standard_normal(shape, np.float32) * np.float32(size)
    return (numbers.view(np.uint32) & 0xFFFF0000).view(np.float32)
