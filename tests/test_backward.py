"""Forward with an adapter and backward against the float64 reference, on every backend that multiplies bfloat16 rows."""

from dataclasses import replace

import numpy as np
import pytest
import ways
from helpers import BF16, DEEPSEEK, GPT_OSS, KINDS, WEIGHTS, random_batch, random_experts, same_bits
from simulated_training import Lora
from trained import arrays_of, assert_right, backward, forward

from ktmoe import SILU, MoELayer, set_num_threads
from ktmoe._native import core
from ktmoe.experts import PROJECTIONS, ROUTER_WEIGHTS


@pytest.fixture(scope="module", params=[name for name, subject in ways.SUBJECTS.items() if subject.activations == "bf16"])
def backend(request, emulator_folder):
    """Those that can train: in the mode bf16."""
    with ways.chosen(ways.SUBJECTS[request.param], emulator_folder) as name:
        yield name


def training_batch(rng, experts, tokens, top_k=2, dtype=BF16):
    """x, ids, weights and the gradient of y; the first pair is of no expert."""
    x, ids, weights = random_batch(rng, experts, tokens, top_k, dtype)
    ids[0, 0] = -1
    return x, ids, weights, rng.standard_normal(x.shape).astype(dtype)


@pytest.mark.cover("values")
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_every_kind_of_weights(backend, weights):
    rng = np.random.default_rng(1)
    experts = random_experts(rng, 3, 96, 160, biases=True, **weights)
    with MoELayer(experts, backend) as layer:
        assert_right(layer, experts, *training_batch(rng, experts, 7), Lora(rng, experts))


@pytest.mark.cover("values")
@pytest.mark.parametrize("weights", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("shape", [(32, 64), (100, 34), (34, 2), (2, 34), (330, 64), (64, 290)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=str)
def test_shapes(backend, shape, weights, dtype):
    rng = np.random.default_rng(shape)
    experts = random_experts(rng, 2, *shape, **weights)
    with MoELayer(experts, backend) as layer:
        for tokens in (1, 5):
            assert_right(layer, experts, *training_batch(rng, experts, tokens, dtype=dtype), Lora(rng, experts))


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("router_weight", ROUTER_WEIGHTS)
@pytest.mark.parametrize("projections", [PROJECTIONS, ("gate",), ("up", "down"), ("down",), ()], ids=str)
@pytest.mark.parametrize("activation", [SILU, DEEPSEEK, replace(GPT_OSS, limit=0.5)])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("weights", ["folded", "fp8-row", "nvfp4 divided"])
def test_where_router_weights_adapters_and_biases_are(router_weight, projections, activation, biases, weights):
    rng = np.random.default_rng(len(projections))
    experts = random_experts(rng, 3, 64, 96, biases=biases, activation=activation, **WEIGHTS[weights])
    lora = Lora(rng, experts, projections=projections) if projections else None
    with MoELayer(experts, router_weight=router_weight, activations="bf16") as layer:
        layer.expert_mask[1] = False
        assert_right(layer, experts, *training_batch(rng, experts, 6, 3), lora, scale=0.5, again=biases)
