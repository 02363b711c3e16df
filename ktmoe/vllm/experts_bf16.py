"""Experts that are not quantized: bfloat16, with or without biases."""

from __future__ import annotations

import ml_dtypes
import torch
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from ktmoe.errors import UnavailableError
from ktmoe.experts import ExpertWeights
from ktmoe.matrix import Matrix
from ktmoe.vllm.experts_layer import Layer
from ktmoe.vllm.experts_method import Format
from ktmoe.weights.formats import BF16


def weights(layer: Layer) -> ExpertWeights:
    """w13_weight [E, 2 I, H] and w2_weight [E, H, I], bfloat16; w13_bias [E, 2 I] and w2_bias [E, H] where there are."""
    dtype = layer.module.w13_weight.dtype
    if dtype != torch.bfloat16:
        found = str(dtype).removeprefix("torch.")
        raise UnavailableError(f"expected bfloat16 weights, found {found}; dtype='bfloat16' rounds them")

    def read(expert: int, projection: str) -> Matrix:
        rows = layer.rows("weight", expert, projection).contiguous()
        codes = rows.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        name = f"{layer.name}.{expert}.{projection}"
        return Matrix(name, BF16, codes.shape, codes, bias=layer.bias(expert, projection))

    return layer.weights(read, BF16)


FORMAT = Format(
    UnquantizedFusedMoEMethod,
    weights,
    {"unquantized_backend": UnquantizedMoeBackend.OOT, "experts_cls": None, "supports_pre_processed_weights": False},
)
