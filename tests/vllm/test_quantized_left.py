"""Quantized experts that are left to vLLM, what the log says of them, and how configs reach other processes."""

from __future__ import annotations

import pickle
from contextlib import suppress

import pytest
from quantized_layers import BLOCKS, CASES, INT4, NAME, TOKENS, compressed, said

#: What ktmoe does not read -> (vLLM's name of it, config.json's, what the log says).
LEFT = {
    "INT8, zero points": (
        "compressed-tensors",
        compressed("pack-quantized", **{**INT4, "num_bits": 8, "symmetric": False}),
        "found int of 8 bits by group, asymmetric, in format pack-quantized",
    ),
    "INT8 with INT8 activations": (
        "compressed-tensors",
        compressed("int-quantized", {**TOKENS, "type": "int"}, num_bits=8, type="int", strategy="channel"),
        "found int of 8 bits by channel, symmetric, in format int-quantized",
    ),
    "GPTQ of 8 bits": (
        "gptq",
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": False, "sym": True},
        "expected GPTQ of 4 bits, found 8",
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("label", LEFT)
def test_what_is_left_to_vllm(layers, caplog, label):
    """One line, however many layers there are; then vLLM's own error, where it has no kernel for this CPU."""
    name, stated, reason = LEFT[label]
    for number in range(2):
        layer = None
        with suppress(ValueError, NotImplementedError):  # vLLM has no kernel for this CPU
            layer = layers.make(layers.quantization(name, stated), 2, 64, 64, f"model.layers.{number}.mlp.experts")
        assert layer is None or not layers.ours(layer)
    lines = said(caplog)
    assert len(lines) == 1
    assert reason in lines[0]
    assert "model.layers.0.mlp.experts" in lines[0]


def test_a_format_without_kernels(layers, caplog):
    """Blocks of 32x32 are read, and not computed: the log says it before vLLM's own error comes."""
    stated = BLOCKS | {"weight_block_size": [32, 32]}
    layer = layers.make(layers.quantization("fp8", stated), 2, 64, 64, f"{NAME}.mlp.experts")
    for parameter in layer.parameters():
        parameter.data.zero_()
    if layers.has_kernel(layer):
        pytest.skip("vLLM has a kernel for FP8 on this CPU")
    with pytest.raises((NotImplementedError, ValueError), match="backend"):
        layer.quant_method.process_weights_after_loading(layer)
    [line] = said(caplog)
    assert "32x32" in line


def test_other_processes_get_these_configs(layers):
    """vLLM pickles its config for the process that runs a model."""
    for name, stated in {case.quantization: case.stated for case in CASES.values()}.items():
        config = layers.quantization(name, stated)
        assert type(config).__module__ == "ktmoe.vllm.configs"
        assert type(pickle.loads(pickle.dumps(config))) is type(config)


def test_layers_that_are_not_quantized(layers):
    """A layer that a checkpoint names as such is bfloat16's, whose class is not one of these."""
    stated = BLOCKS | {"modules_to_not_convert": [f"{NAME}.mlp.experts"]}
    layer = layers.make(layers.quantization("fp8", stated), 2, 128, 128, f"{NAME}.mlp.experts")
    assert layer.w13_weight.dtype == layer.params_dtype
    assert "Unquantized" in type(layer.quant_method).__name__
