"""Whether a participant's outputs are right: sampled ones against float64.

The measure is the norm of the errors over the norm of the outputs. What bfloat16's roundings explain, of h, of the gradients of
g and u, and of all results between them in a participant that keeps those in bfloat16, is below 2 %. torch adds up a router
weight's gradient in bfloat16, too, which makes up to 7 %. A missing factor, a wrong expert or a transposed matrix makes 50 % or
more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from bench.peers.workers.protocol import PROJECTIONS
from bench.peers.workers.steps import ALPHA, Inputs, adapter
from ktmoe.experts import ExpertWeights
from ktmoe.reference.gradients import ReferenceTraining
from ktmoe.training import Lora

MOST_ERROR = {"grad_weights": 0.1}
OTHERS = 0.02
#: The adapters' gradients are compared of the expert that has most rows, but no more than these, which float64 is quick for.
MOST_ROWS = 128


@dataclass(frozen=True)
class Sample:
    """One token of batch 0, and one expert's adapters."""

    token: int
    expert: int
    expected: Mapping[str, np.ndarray]

    def wrong(self, errors: Mapping[str, float]) -> list[str]:
        """What is beyond that."""
        return [f"{name} is off by {error:.2%}" for name, error in errors.items() if not error <= MOST_ERROR.get(name, OTHERS)]

    def errors(self, found: Mapping[str, np.ndarray]) -> dict[str, float]:
        """The error of each output, by its name."""
        return {name: self._error(found[name], name) for name in self.expected}

    def _error(self, found: np.ndarray, name: str) -> float:
        expected = self.expected[name]
        if name in ("y", "grad_x", "grad_weights"):
            found = found[self.token]
        return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def sample(experts: ExpertWeights, inputs: Inputs, rank: int) -> Sample:
    """What to compare, by the float64 reference."""
    ids, weights = inputs.ids[0], inputs.weights[0]
    x, grad_y = (bits.view(ml_dtypes.bfloat16).astype(np.float64) for bits in (inputs.x, inputs.grad_y))
    token = inputs.tokens // 2
    used, places = np.unique(ids[token], return_inverse=True)
    at = slice(token, token + 1)
    y, of_token = _step(experts, used, rank, x[at], places[None], weights[at], grad_y[at])
    expected = {"y": y[0], "grad_x": of_token.x[0], "grad_weights": of_token.weights[0]}
    rows = np.bincount(ids.reshape(-1), minlength=experts.num_experts)
    expert = int(np.argmax(np.where(rows <= MOST_ROWS, rows, 0)))
    tokens, slots = np.nonzero(ids == expert)
    of_one = weights[tokens, slots][:, None]
    _, of_expert = _step(experts, [expert], rank, x[tokens], np.zeros((len(tokens), 1), int), of_one, grad_y[tokens])
    for name, (a, b) in of_expert.lora.items():
        expected[f"{name}_a"], expected[f"{name}_b"] = a[0], b[0]
    return Sample(token, expert, expected)


def _step(experts: ExpertWeights, used, rank: int, x, ids, weights, grad_y):
    """(y, gradients) with some experts; ids: their places among those."""
    pairs = {}
    for name in PROJECTIONS:
        each = [adapter(experts, rank, name, int(expert)) for expert in used]
        pairs[name] = tuple(np.stack(part) for part in zip(*each, strict=True))
    lora = Lora(pairs, ALPHA)
    training = ReferenceTraining(experts.take([int(expert) for expert in used]))
    y, saved = training.forward(x, ids, weights, lora)
    return y, training.backward(saved, grad_y, lora)
