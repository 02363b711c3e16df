"""Layers of quantized experts: what vLLM makes and fills is what ktmoe's own loader reads from the same tensors."""

from __future__ import annotations

import checkpoints
import numpy as np
import pytest
from helpers import assert_right, random_batch, same_bits
from quantized_layers import CASES, NAME, config_of, fill_gpt_oss, filled, sane

import ktmoe
from ktmoe.errors import FormatError
from ktmoe.experts import PROJECTIONS
from ktmoe.layer import MoELayer


@pytest.mark.smoke
@pytest.mark.parametrize("label", CASES)
def test_every_format(layers, tmp_path, label):
    """Every number is the checkpoint's. Outputs have the bits of ktmoe's own loader, within their bound. No copy is left."""
    case = CASES[label]
    scheme = checkpoints.SCHEMES[case.scheme]
    hidden, intermediate = (256, 128) if "fp8" in case.scheme or "base" in case.scheme else (96, 64)
    tensors = sane(scheme.layer(NAME, hidden=hidden, intermediate=intermediate))
    layer = filled(layers, case, tensors, hidden, intermediate)
    method = layer.quant_method
    assert type(method).__name__ == case.method
    experts = layers.experts(layer)
    for expert in range(checkpoints.EXPERTS):
        for projection in PROJECTIONS:
            meaning = scheme.meaning(tensors, f"{NAME}.{scheme.module}", expert, projection)
            checkpoints.check_matrix(experts.matrix(expert, projection), *meaning)

    checkpoints.write(tmp_path, tensors, config_of(case))
    own = ktmoe.load_experts(tmp_path, 0)
    assert own.activation == experts.activation
    x, ids, weights = random_batch(np.random.default_rng(1), own, 9, 2, checkpoints.BF16)
    method.process_weights_after_loading(layer)
    y = layers.apply(layer, x, ids, weights)
    with MoELayer(own) as loaded:
        assert same_bits(y, loaded.forward(x, ids, weights))
    assert_right(method.packed, own, x, ids, weights, y)
    assert not sum(parameter.numel() for parameter in layer.parameters())


def test_scales_of_other_dtypes_are_kept(layers):
    """vLLM would round float16 scales to the model's bfloat16; what both dtypes lack is refused."""
    case = CASES["INT4"]
    tensors = checkpoints.SCHEMES["int4"].layer(NAME)
    for tensor in tensors.values():
        if tensor[0] == "BF16":
            tensor[:] = "F16", tensor[1].astype(np.float16) + np.float16(2**-14)
    layer = filled(layers, case, tensors, 96, 64)
    found = layers.experts(layer)
    assert found.formats["gate"].scale.kind == "fp16"
    stored = tensors[f"{NAME}.mlp.experts.1.up_proj.weight_scale"][1]
    np.testing.assert_array_equal(found.matrix(1, "up").scales, stored)
    layer.w2_weight_scale.data[0, 0, 0] = 1 + 2.0**-20
    with pytest.raises(FormatError, match="weight_scale: expected scales that are all bf16 or all fp16 numbers"):
        layers.experts(layer)


def test_a_part_of_each_expert(layers):
    """Tensor parallelism: the first of two processes has 64 of 96 rows, as vLLM pads what has whole groups of 32."""
    case, tensors = CASES["gpt-oss"], sane(checkpoints.SCHEMES["gpt_oss"].layer(NAME, hidden=96, intermediate=96))
    config = layers.quantization(case.quantization, case.stated)
    layer = layers.make(config, checkpoints.EXPERTS, 96, 96, f"{NAME}.mlp.experts", tp_size=2, **case.arguments)
    assert layer.intermediate_size_per_partition == 64
    part = {
        name: [dtype, array[:, :128] if "gate_up" in name else array[:, :, :2] if "bias" not in name else array]
        for name, (dtype, array) in tensors.items()
    }
    fill_gpt_oss(layer, {name.rpartition("experts.")[2]: layers.tensor(*tensor) for name, tensor in part.items()})
    experts = layers.experts(layer)
    for projection in PROJECTIONS:
        weights, bias = checkpoints.SCHEMES["gpt_oss"].meaning(tensors, f"{NAME}.mlp.experts", 1, projection)
        rows, columns = (96, 64) if projection == "down" else (64, 96)
        checkpoints.check_matrix(experts.matrix(1, projection), weights[:rows, :columns], bias[:rows])
