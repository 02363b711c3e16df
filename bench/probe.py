"""Is a measured call's result right? One token that the reference has computed, once for all calls of the same weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from bench.cases import Way
from ktmoe import measuring, reference
from ktmoe.experts import ExpertWeights
from ktmoe.layer import MoELayer

_COLUMNS = 64


@dataclass(frozen=True)
class Probe:
    """A token, its routing, and what some of its outputs have to be."""

    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    columns: np.ndarray
    expected: reference.Reference

    def check(self, layer: MoELayer, batch: measuring.MeasuredBatch, y: np.ndarray) -> measuring.Check:
        """y: what a measured call of that batch gave. The probe is one token more in a second call, whose outputs are float32.

        The probe's outputs must be within the reference's bound. All other tokens' outputs, rounded, must equal y bit for bit,
        since no token's result may depend on the others: the error is infinite if they do not.
        """
        x, ids, weights = (
            np.concatenate(parts)
            for parts in zip((batch.x, batch.ids, batch.weights), (self.x, self.ids, self.weights), strict=True)
        )
        y32 = layer.forward(x.astype(np.float32), ids, weights)
        if not np.array_equal(y32[:-1].astype(y.dtype).view(np.uint16), y.view(np.uint16)):
            return measuring.Check(math.inf, math.nan)
        return measuring.Check.of(y32[-1:][:, self.columns], self.expected)


def make(experts: ExpertWeights, ids: list[int], way: Way) -> Probe:
    """A random token that goes to these experts; the reference takes seconds."""
    random = np.random.default_rng(1)
    x = random.standard_normal((1, experts.hidden), np.float32).astype(ml_dtypes.bfloat16)
    weights = np.full((1, len(ids)), 1 / len(ids), np.float32)
    columns = np.sort(random.choice(experts.hidden, min(_COLUMNS, experts.hidden), replace=False))
    routing = np.array([ids], np.int64)
    expected = reference.forward(
        experts, x, routing, weights, out_dtype="float32", columns=columns, activations=way.activations, **way.choices
    )
    return Probe(x, routing, weights, columns, expected)
