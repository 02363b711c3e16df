"""Weights that vLLM loads again into a layer, random ones, with which it measures, and a part of a layer's experts."""

from __future__ import annotations

import checkpoints
import numpy as np
import pytest
import torch
from helpers import random_batch, same_bits
from quantized_layers import CASES, NAME, Case, config_of, fill, filled, sane

import ktmoe
from ktmoe.errors import UnavailableError
from ktmoe.layer import MoELayer

HIDDEN, INTERMEDIATE = 96, 64


def two_checkpoints(case: Case) -> list[checkpoints.Tensors]:
    """The second has other codes."""
    first = sane(checkpoints.SCHEMES[case.scheme].layer(NAME, hidden=HIDDEN, intermediate=INTERMEDIATE))
    second = {
        name: [dtype, array if "scale" in name or array.ndim < 2 else np.ascontiguousarray(array[::-1])]
        for name, (dtype, array) in first.items()
    }
    return [first, second]


@pytest.mark.smoke("one")
@pytest.mark.parametrize("label", ["gpt-oss", "MXFP4", "MXFP8", "FP8 per row", "AWQ", "NVFP4"])
def test_weights_that_are_loaded_again(layers, tmp_path, label):
    """By vLLM's reload_weights(), as often as it is called; a compiled graph holds the tensor that finds the layer."""
    from vllm.model_executor.model_loader.reload import layerwise  # not before: vLLM warns

    case = CASES[label]
    tensors = two_checkpoints(case)
    layer = filled(layers, case, tensors[0], HIDDEN, INTERMEDIATE)
    layerwise.record_metadata_for_reloading(layer)
    layer.quant_method.process_weights_after_loading(layer)
    held = layer.ktmoe
    for number in (1, 0, 1):
        layerwise.initialize_layerwise_reload(layer)
        fill(layers, layer, case, tensors[number])
        layerwise.finalize_layerwise_reload(layer, None)
        assert layer.ktmoe is held
        folder = tmp_path / str(number)
        if not folder.exists():
            folder.mkdir()
            checkpoints.write(folder, tensors[number], config_of(case))
        with MoELayer(ktmoe.load_experts(folder, 0)) as own:
            x, ids, weights = random_batch(np.random.default_rng(1), own.spec, 5, 2, checkpoints.BF16)
            assert same_bits(layers.apply(layer, x, ids, weights), own.forward(x, ids, weights))
    assert not sum(parameter.numel() for parameter in layer.parameters())


@pytest.mark.parametrize("label", ["INT4", "GPTQ"])
def test_weights_that_are_loaded_once(layers, label):
    """vLLM would begin to process them before the last parameter is there, or without parameters that no checkpoint has."""
    case = CASES[label]
    layer = filled(layers, case, two_checkpoints(case)[0], HIDDEN, INTERMEDIATE)
    layer.quant_method.process_weights_after_loading(layer)
    with pytest.raises(UnavailableError, match=rf"experts: expected weights that are loaded once, .* \({case.method}\)"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("label", ["INT4", "GPTQ", "AWQ"])
def test_random_weights(layers, monkeypatch, label):
    """--load-format dummy. Its scales are no numbers of a checkpoint."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    load_config = get_current_vllm_config().load_config
    monkeypatch.setattr(load_config, "load_format", "dummy")
    case = CASES[label]
    config = layers.quantization(case.quantization, case.stated)
    layer = layers.make(config, checkpoints.EXPERTS, HIDDEN, INTERMEDIATE, f"{NAME}.mlp.experts", **case.arguments)
    DummyModelLoader(load_config).load_weights(layer, None)
    layer.quant_method.process_weights_after_loading(layer)
    x, ids, weights = random_batch(np.random.default_rng(1), layer.quant_method.packed.spec, 5, 2, checkpoints.BF16)
    assert np.isfinite(layers.apply(layer, x, ids, weights).astype(np.float32)).all()


def test_experts_of_other_processes(layers):
    """Expert parallelism: vLLM numbers the experts of all processes, and those that are elsewhere add zero."""
    case = CASES["MXFP4"]
    layer = filled(layers, case, two_checkpoints(case)[0], HIDDEN, INTERMEDIATE)
    layer.quant_method.process_weights_after_loading(layer)
    x, places, weights = random_batch(np.random.default_rng(1), layer.quant_method.packed.spec, 9, 2, checkpoints.BF16)
    places[::3, 0] = -1
    expected = layers.apply(layer, x, places, weights)
    layer._expert_map = torch.tensor([-1, 2, 0, -1, 1], dtype=torch.int32)
    ids = np.array([2, 4, 1, 3], places.dtype)[places]  # of place -1: an expert that is elsewhere
    ids[3, 0] = -1  # as vLLM marks rows that it has added
    assert same_bits(layers.apply(layer, x, ids, weights), expected)


def test_no_tokens(layers):
    case = CASES["MXFP4"]
    layer = filled(layers, case, two_checkpoints(case)[0], HIDDEN, INTERMEDIATE)
    layer.quant_method.process_weights_after_loading(layer)
    x, ids, weights = random_batch(np.random.default_rng(1), layer.quant_method.packed.spec, 0, 2, checkpoints.BF16)
    assert layers.apply(layer, x, ids, weights).shape == (0, HIDDEN)
