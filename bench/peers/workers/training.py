"""What workers that train share: the adapter, the gradient of the output, and which calls are timed. Needs numpy alone.

A worker's settings are STEPS: a forward that saves what backward needs, and that with backward after it. After a forward the
output is y, after a step it is the gradient of x.
"""

from __future__ import annotations

import numpy as np
from protocol import Batches, Model
from weights import bfloat16

RANK, ALPHA = 16, 32.0
#: Clamp of the activation: DeepSeek-V4's.
LIMIT = 10.0
FORWARD, STEP = "forward", "forward and backward"
STEPS = (FORWARD, STEP)
_SPREAD = 0.02


def adapter(model: Model) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By projection: A [experts, RANK, inputs] and B [experts, outputs, RANK], bfloat16 bits, the same in every process."""
    gate, down = (model.intermediate, model.hidden), (model.hidden, model.intermediate)
    shapes = {"gate": gate, "up": gate, "down": down}
    rng = np.random.default_rng(16)
    made = {}
    for name, (outputs, inputs) in shapes.items():
        sizes = (model.experts, RANK, inputs), (model.experts, outputs, RANK)
        made[name] = tuple(np.stack([_random(rng, size[1:]) for _ in range(size[0])]) for size in sizes)
    return made


def output_gradient(batches: Batches) -> np.ndarray:
    """bfloat16 bits [tokens, hidden]."""
    return _random(np.random.default_rng(len(batches.x)), batches.x.shape)


def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return bfloat16(_SPREAD * rng.standard_normal(shape, np.float32))
