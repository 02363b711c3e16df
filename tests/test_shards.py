"""What a layer on several NUMA nodes computes, by a layer for each shard and numpy, which adds them up: within the bound."""

from dataclasses import replace

import numpy as np
import pytest
from helpers import BF16, GPT_OSS, MIXED, WEIGHTS, random_batch, random_experts

from ktmoe import ExpertWeights, Matrix, MoELayer, numa, reference
from ktmoe.layer import ROUTER_WEIGHTS


def cuts(experts: ExpertWeights, shards: int) -> list[tuple[int, int]]:
    """As a layer of these experts is cut."""
    return numa.split(experts.intermediate, experts.shard_unit, shards)


def shard_of(experts: ExpertWeights, first: int, last: int) -> ExpertWeights:
    """The experts with the intermediate dimension from first to last only; the bias of down goes with 0."""

    def read(expert: int, projection: str) -> Matrix:
        matrix = experts.matrix(expert, projection)
        if projection != "down":
            codes, scales, bias = (v if v is None else v[first:last] for v in (matrix.codes, matrix.scales, matrix.bias))
            return replace(matrix, shape=(last - first, experts.hidden), codes=codes, scales=scales, bias=bias)

        def columns(array, each):
            return np.ascontiguousarray(array[:, first // each : -(-last // each)])

        scale = matrix.format.scale
        return replace(
            matrix,
            shape=(experts.hidden, last - first),
            codes=columns(matrix.codes, matrix.format.codes_per_item),
            scales=columns(matrix.scales, scale.extent[1]) if scale else None,
            bias=None if first else matrix.bias,
        )

    size = last - first
    return ExpertWeights(experts.num_experts, experts.hidden, size, read, experts.formats, experts.activation, experts.name)


def partial_outputs(experts: ExpertWeights, shards: list[tuple[int, int]], batch, backend: str, **settings) -> np.ndarray:
    """float32 [shards, tokens, hidden], each from a layer of its own."""
    x, ids, weights = batch
    parts = []
    for first, last in shards:
        with MoELayer(shard_of(experts, first, last), backend, **settings) as layer:
            parts.append(layer.forward(x.astype(np.float32), ids, weights))
    return np.array(parts)


@pytest.mark.parametrize("weights", [*WEIGHTS.values(), *MIXED.values()], ids=[*WEIGHTS, *MIXED])
def test_shards_that_are_added_up_are_within_the_bound(backend, weights):
    rng = np.random.default_rng(1)
    experts = random_experts(rng, 3, 100, 418, **weights)
    batch = random_batch(rng, experts, 9, 2)
    with MoELayer(experts, backend, scales="folded") as layer:
        settings = {"activations": layer.activations, "scales": layer.scales}
    for n, scales in ((2, settings["scales"]), (3, "exact")):
        shards = cuts(experts, n)
        parts = partial_outputs(experts, shards, batch, backend, scales=scales)
        y = sum(parts[1:], start=parts[0])
        float32, rounded = (
            reference.forward(experts, *batch, shards=shards, out_dtype=dtype, **settings | {"scales": scales})
            for dtype in ("float32", "bfloat16")
        )
        assert np.isfinite(float32.bound).all()
        assert float32.worst(y) <= 1
        assert float32.worst(y - parts[-1]) > 1
        assert rounded.worst(y.astype(BF16)) <= 1


@pytest.mark.parametrize("router_weight", ROUTER_WEIGHTS)
def test_router_weights_and_biases(backend, router_weight):
    rng = np.random.default_rng(2)
    experts = random_experts(rng, 3, 100, 200, biases=True, activation=GPT_OSS)
    batch = random_batch(rng, experts, 9, 3)
    shards = cuts(experts, 3)
    parts = partial_outputs(experts, shards, batch, backend, router_weight=router_weight)
    with MoELayer(experts, backend) as layer:
        given = {"activations": layer.activations, "router_weight": router_weight, "out_dtype": "float32"}
    expected = reference.forward(experts, *batch, shards=shards, **given)
    assert np.isfinite(expected.bound).all()
    assert expected.worst(parts[0] + parts[1] + parts[2]) <= 1
