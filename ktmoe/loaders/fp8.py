"""FP8 with a scale per block of 128x128: DeepSeek-V3, R1 and V3.2, Kimi-K2, Qwen3-FP8, MiniMax-M2, compressed-tensors' "block".

An expert's tensors are {base}.{E}.{gate,up,down}_proj or {base}.{E}.{w1,w3,w2} and

    weight            F8_E4M3 [N, K]
    weight_scale_inv  F32, BF16 or F8_E8M0 [ceil(N/128), ceil(K/128)], or weight_scale

A weight is its E4M3 number times its block's scale, whatever the scale's name says. weight_block_size in config.json's
quantization_config is the block's size where it is given.
"""

from __future__ import annotations

from typing import ClassVar

from ktmoe.errors import FormatError
from ktmoe.loaders import naming, quantization, registry
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.per_expert import Headers, PerExpert, spellings
from ktmoe.messages import show
from ktmoe.weights.formats import WeightFormat, fp8

_FOREIGN = {"bias": "biases are not supported", "input_scale": "activations with a scale of their own are not supported"}


class Fp8(PerExpert):
    """Reads E4M3 experts with one scale per block."""

    names = naming.Names(
        "FP8 experts",
        *spellings({"codes": ".weight", "scales": ".weight_scale_inv"}, foreign=_FOREIGN),
        *spellings({"codes": ".weight", "scales": ".weight_scale"}, foreign=_FOREIGN),
    )
    dtypes: ClassVar = {"codes": ("F8_E4M3",)}

    def format(self, headers: Headers) -> WeightFormat:
        return fp8(headers.kind("F32", "BF16", "F8_E8M0"), _block(headers.checkpoint))


def _block(checkpoint: Checkpoint) -> tuple[int, int]:
    stated = quantization.read(checkpoint).get("weight_block_size")
    if stated is None:
        return 128, 128
    if not (isinstance(stated, list) and len(stated) == 2 and all(type(size) is int and 0 < size < 2**31 for size in stated)):
        where = f"{checkpoint.path}: quantization_config.weight_block_size of config.json"
        raise FormatError(f"{where}: expected two counts, found {show(stated)}")
    return stated[0], stated[1]


registry.register("fp8", Fp8())
