"""MoE models of transformers, written by save_pretrained(): each one's own module of experts computes what ktmoe computes.

The module runs in float64 on the weights that were saved. So it shows which rows are gate and up, what is transposed or
interleaved, the activation, and what the router weight multiplies.
"""

import numpy as np
import pytest
from served import check_layer, claimed, plain
from tiny_models import EXPERTS, HIDDEN, INTERMEDIATE, MODELS, REFUSED
from writing import routed

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
