"""MoE models of transformers, written by save_pretrained(): each one's own module of experts computes what ktmoe computes.

The module runs in float64 on the weights that were saved. So it shows which rows are gate and up, what is transposed or
interleaved, the activation, and what the router weight multiplies.
"""

import numpy as np
import pytest
from checkpoints import numbers
from served import UNIT, check_layer, claimed, plain
from tiny_models import EXPERTS, HIDDEN, INTERMEDIATE, MODELS, REFUSED
from writing import routed

from ktmoe import load_matrix, load_mlp
from ktmoe.errors import KtmoeError
from ktmoe.loaders.base import find_loader
from ktmoe.loaders.checkpoint import Checkpoint


@pytest.mark.smoke
@pytest.mark.parametrize("model", MODELS)
def test_a_model(case, model):
    folder = case("torch", "transformers", model)
    with np.load(folder / "expected.npz") as arrays:
        expected = dict(arrays)
    loader, checkpoint = claimed(folder, MODELS[model][0])
    assert [f"y.{layer}" for layer in loader.layers(checkpoint)] == list(expected)
    for layer in loader.layers(checkpoint):
        experts = loader.load(checkpoint, layer)
        assert (experts.num_experts, experts.hidden, experts.intermediate) == (EXPERTS, HIDDEN, INTERMEDIATE)
        y, bound = plain(experts, *routed(HIDDEN, EXPERTS))
        difference = np.abs(expected[f"y.{layer}"] - y)
        assert (difference <= bound).all(), (difference / bound).max()
        assert bound.max() < np.abs(y).max() * 1e-9  # so that the comparison means something
    check_layer(folder, layer, EXPERTS, HIDDEN)


@pytest.mark.smoke
@pytest.mark.parametrize("model", REFUSED)
def test_a_refused_model(case, model):
    checkpoint = Checkpoint(case("torch", "transformers", model))
    with pytest.raises(KtmoeError, match=REFUSED[model][1]):
        find_loader(checkpoint).load(checkpoint, 0)


@pytest.mark.smoke
@pytest.mark.parametrize("model", ["phi3", "glm4", "qwen2"])
def test_a_dense_model(case, model):
    """By names that it has, and by others: Phi-3 fuses q, k and v, and gate and up; GLM-4 gate and up; Qwen2 nothing."""
    folder = case("torch", "transformers_dense", model)
    with np.load(folder / "expected.npz") as arrays:
        expected = dict(arrays)
    x, base = expected["x"], "model.layers.0"
    expected["qkv"] = np.concatenate([expected[stem] for stem in "qkv"], 1)
    for stem in ("q", "k", "v", "qkv"):
        matrix = load_matrix(folder, f"{base}.self_attn.{stem}_proj")
        weights, bias = numbers(matrix), 0 if matrix.bias is None else matrix.bias.astype(np.float64)
        bound = 2 * (x.shape[1] + 1) * UNIT * (np.abs(x) @ np.abs(weights.T) + np.abs(bias))
        assert (np.abs(x @ weights.T + bias - expected[stem]) <= bound).all()
        assert (matrix.bias is None) == (model == "phi3")
    y, bound = plain(load_mlp(folder, f"{base}.mlp"), x, np.zeros((len(x), 1), int), np.ones((len(x), 1)))
    assert (np.abs(y - expected["mlp"]) <= bound).all()
    halves = [numbers(load_matrix(folder, f"{base}.mlp.{stem}_proj")) for stem in ("gate", "up")]
    np.testing.assert_array_equal(numbers(load_matrix(folder, f"{base}.mlp.gate_up_proj")), np.concatenate(halves))
