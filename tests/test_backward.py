"""Forward with an adapter and backward against the float64 reference, on every backend that multiplies bfloat16 rows."""

from dataclasses import replace

import numpy as np
import pytest
import ways
from helpers import BF16, DEEPSEEK, GPT_OSS, KINDS, WEIGHTS, random_experts, shards_of
from simulated_training import Lora
from trained import assert_right, training_batch

from ktmoe import SILU, MoELayer, set_num_threads
from ktmoe._native import core
from ktmoe.experts import PROJECTIONS, ROUTER_WEIGHTS


@pytest.fixture(scope="module", params=[name for name, subject in ways.SUBJECTS.items() if subject.activations == "bf16"])
def backend(request, emulator_folder):
    """A backend that can train: in the mode bf16."""
    with ways.chosen(ways.SUBJECTS[request.param], emulator_folder) as name:
        yield name


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


@pytest.mark.parametrize("rank", [1, 15, 16, 17, 65, 256])
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
def test_ranks_and_dtypes_of_adapters(rank, dtype):
    rng = np.random.default_rng(rank)
    experts = random_experts(rng, 2, 130, 96)
    with MoELayer(experts, activations="bf16") as layer:
        lora = Lora(rng, experts, rank=rank, dtype=dtype)
        assert_right(layer, experts, *training_batch(rng, experts, 5), lora)


def test_more_rows_than_one_call_has():
    rng = np.random.default_rng(2)
    experts = random_experts(rng, 2, 64, 64)
    with MoELayer(experts, activations="bf16") as layer:
        assert_right(layer, experts, *training_batch(rng, experts, core.ROWS_MAX + 30, 2), Lora(rng, experts))


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(1090, 96), (96, 578)], ids=str)
def test_more_columns_than_are_done_at_once(shape, dtype):
    """512 of a product, of an adapter's rows and of its numbers."""
    rng = np.random.default_rng(5)
    experts = random_experts(rng, 2, *shape, biases=True, **WEIGHTS["fp8-row"])
    for router_weight in ROUTER_WEIGHTS:
        with MoELayer(experts, activations="bf16", router_weight=router_weight) as layer:
            lora = Lora(rng, experts, dtype=dtype)
            assert_right(layer, experts, *training_batch(rng, experts, 5), lora)


@pytest.mark.usefixtures("three_nodes")
@pytest.mark.parametrize("router_weight", ROUTER_WEIGHTS)
@pytest.mark.parametrize("weights", ["folded", "fp8-row"])
def test_shards(weights, router_weight):
    rng = np.random.default_rng(3)
    experts = random_experts(rng, 3, 96, 256, biases=True, **WEIGHTS[weights])
    with MoELayer(experts, numa_nodes=[0, 2, 1], activations="bf16", router_weight=router_weight) as layer:
        assert layer.placement.shards == 3
        assert_right(layer, experts, *training_batch(rng, experts, 6, 3), Lora(rng, experts))


@pytest.mark.usefixtures("three_nodes")
@pytest.mark.parametrize("threads", [3, 8])
def test_workers_of_a_narrow_shard_take_rows_of_a_wide_one(threads):
    """For down's adapter, all shards' h of an expert: more numbers than x has, and than the narrow shard's own h."""
    rng = np.random.default_rng(4)
    experts = random_experts(rng, 9, 8, 320)
    set_num_threads(threads)
    with MoELayer(experts, numa_nodes=[0, 2, 1], activations="bf16") as layer:
        widths = [last - first for first, last in shards_of(layer, experts)]
        assert min(widths) < max(widths)
        lora = Lora(rng, experts, projections=("down",), dtype=BF16)
        assert_right(layer, experts, *training_batch(rng, experts, 40, 3), lora)
