"""The backends that can be measured with some experts, and a measured call's outputs against the float64 reference."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ktmoe import backends, reference
from ktmoe._native import core
from ktmoe.backends.base import Found
from ktmoe.experts import ExpertWeights
from ktmoe.layer import MoELayer
from ktmoe.measuring.batches import MeasuredBatch


def backends_for(experts: ExpertWeights) -> dict[str, core.KernelTable]:
    """The backends that can run these experts here, best first, each with the kernel table that it serves them with.

    Those with a kernel table: the limits of others cannot be measured from here.
    """
    found = {}
    for name in backends.ranked():
        match backends.get(name).claim(experts):
            case Found(table=table) if table is not None:
                found[name] = table
    return found


@dataclass(frozen=True)
class Check:
    """A call's sampled outputs against the float64 reference.

    error: the largest as a share of its bound: above 1 is wrong. bound: the median bound as a share of the outputs' rms.
    """

    error: float
    bound: float

    @classmethod
    def of(cls, y: np.ndarray, expected: reference.Reference) -> Check:
        """Check float32 outputs y against what is expected, which has the same shape."""
        scale = float(np.sqrt(np.mean(np.square(expected.y))))
        return cls(expected.worst(y), float(np.median(expected.bound)) / scale if scale else math.nan)


def check(experts: ExpertWeights, layer: MoELayer, batch: MeasuredBatch, *, tokens: int = 1, columns: int = 64) -> Check:
    """Compare a sample of a call's outputs with the reference.

    The sample is taken with float32 outputs, whose bound is the computation's own; rounded, all of them must equal the
    measured call's bfloat16 outputs bit for bit, or the error is infinite. The reference takes seconds for a token.
    """
    y = layer.forward(batch.x, batch.ids, batch.weights)
    y32 = layer.forward(batch.x.astype(np.float32), batch.ids, batch.weights)
    if not np.array_equal(y32.astype(y.dtype).view(np.uint16), y.view(np.uint16)):
        return Check(math.inf, math.nan)
    random = np.random.default_rng(len(batch.x))
    rows = random.choice(len(batch.x), min(tokens, len(batch.x)), replace=False)
    outputs = np.sort(random.choice(experts.hidden, min(columns, experts.hidden), replace=False))
    expected = reference.forward(
        experts,
        batch.x[rows],
        batch.ids[rows],
        batch.weights[rows],
        router_weight=layer.router_weight,
        out_dtype="float32",
        columns=outputs,
        activations=layer.activations,
        rounding=layer.rounding,
        tuned_for=layer.tuned_for,
    )
    return Check.of(y32[rows][:, outputs], expected)
