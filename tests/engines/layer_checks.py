"""The errors of layers that ktmoe.transformers.accuracy finds, beside the float64 reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import ktmoe
from ktmoe import reference
from ktmoe.transformers.accuracy import Accuracy


def check_layers(path: Path, found: Accuracy, **rounded: str) -> None:
    """The second run's layers. rounded: what tells the reference how they round.

    A layer's output is within its bound of its own reference. So the norm of the difference of two is that of the references'
    difference, but for the norms of both bounds.
    """
    assert len(found.layers) == len(found.runs[1].layers) > 1
    for layer, difference in zip(found.layers, found.runs[1].layers, strict=True):
        sample = layer.sample
        experts = ktmoe.load_experts(path, int(layer.name.split(".")[2]))
        batch = sample.x.float().numpy(), sample.ids.numpy(), sample.weights.numpy()
        exact, other = (reference.forward(experts, *batch, out_dtype="float32", **options) for options in ({}, rounded))
        size = np.linalg.norm(exact.y)
        expected = np.linalg.norm(other.y - exact.y) / size
        bound = (np.linalg.norm(other.bound) + np.linalg.norm(exact.bound)) / size
        assert abs(difference.relative - expected) <= bound * (1 + difference.relative)
        assert bound < 0.5 * expected  # or it would be no test
        assert difference.relative <= difference.largest
        assert layer.relative > 0
        assert 0 < layer.of_bound <= 1
