"""Whether a participant's outputs are right, before any of its calls is timed: sampled outputs against float64.

ktmoe is held to its own derived bound (docs/numerics.md). A peer has no such bound, so that the measure is the error's norm
over the outputs' norm, and what its numerics explain is the most that it may be:

    bf16   Gate and up, h, each expert's output and their sum may each be rounded to bfloat16, by 2^-8 at most and 0.17 % in
           the mean, and so may each of the few partial sums, and weights of more bits that a peer has in bfloat16, which
           are 0.3 % of y: below 1 %.
    int8   x and h are 8-bit integers with a scale per 32, rounded by half a step at most and 0.29 steps in the mean. A step
           is 1/127 of the group's largest, which is about 2.1 standard deviations of x and 3 to 4 of h, a product: 0.5 %
           of x, which counts in gate and in up, and 0.9 % of h. Together 1.2 %; below 2 %.
    int8, per 256   The same with a scale per 256, whose largest is 2.9 standard deviations of x and about 6 of h: 0.66 % of x,
           twice, and 1.4 % of h. Together 1.7 %, and more where h has larger ones; below 3 %.

The reference rounds h to bfloat16, as ktmoe does by contract, and nothing else.

A wrong scale, a swapped nibble or a missed expert makes 10 % at least.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from bench.peers.peers import BF16, INT8, INT8_PER_256
from bench.peers.workers.protocol import Batches
from ktmoe import reference
from ktmoe.experts import ExpertWeights

MOST_ERROR = {BF16: 0.01, INT8: 0.02, INT8_PER_256: 0.03}
COLUMNS = 256


@dataclass(frozen=True)
class Sample:
    """Some tokens' outputs in some columns, of one batch. forward: their reference, by ktmoe's activation mode."""

    batch: int
    tokens: np.ndarray
    columns: np.ndarray
    forward: Callable[[str], reference.Reference]

    def error(self, y: np.ndarray) -> float:
        """|y - float64| / |float64| of a call's outputs, as norms over the sample."""
        expected = self.forward("bf16").y
        error = np.linalg.norm(y[self.tokens][:, self.columns] - expected) / np.linalg.norm(expected)
        return float(error) if np.isfinite(error) else float("inf")

    def of_bound(self, y: np.ndarray, activations: str) -> float:
        """The largest error of bfloat16 outputs as a share of ktmoe's bound for its mode: above 1 is wrong."""
        return self.forward(activations).worst(y[self.tokens][:, self.columns])


def sample(experts: ExpertWeights, batches: Batches, batch: int) -> Sample:
    """What to compare. The reference takes a second or two a token, so that one or two must do."""
    random = np.random.default_rng(batches.tokens)
    tokens = np.sort(random.choice(batches.tokens, min(batches.tokens, 2 if batches.tokens > 16 else 1), replace=False))
    columns = np.sort(random.choice(experts.hidden, min(experts.hidden, COLUMNS), replace=False))

    @functools.cache
    def forward(activations: str) -> reference.Reference:
        return reference.forward(
            experts,
            batches.x[tokens].view(ml_dtypes.bfloat16),
            batches.ids[batch][tokens],
            batches.weights[batch][tokens],
            columns=columns,
            activations=activations,
        )

    return Sample(batch, tokens, columns, forward)
