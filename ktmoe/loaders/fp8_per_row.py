"""FP8 with a scale per output row ("channel"): GLM-4.7-FP8, and what llm-compressor writes as FP8_DYNAMIC.

An expert's tensors are {base}.{E}.{gate,up,down}_proj or {base}.{E}.{w1,w3,w2} and

    weight        F8_E4M3 [N, K]
    weight_scale  F32, BF16 or F16 [N, 1] or [N]

A weight is its E4M3 number times its row's scale, which is kept in float32. Activations stay bfloat16, whatever config.json
says of quantizing them when the model runs.
"""

from __future__ import annotations

from typing import ClassVar

from ktmoe.loaders import naming, registry
from ktmoe.loaders.per_expert import Headers, PerExpert, spellings
from ktmoe.weights.formats import FP8_PER_ROW, WeightFormat

_FOREIGN = {"bias": "biases are not supported", "input_scale": "activations with a scale of their own are not supported"}


class Fp8PerRow(PerExpert):
    """Reads E4M3 experts with one scale per row."""

    names = naming.Names("FP8 experts", *spellings({"codes": ".weight", "factor": ".weight_scale"}, foreign=_FOREIGN))
    dtypes: ClassVar = {"codes": ("F8_E4M3",)}

    def format(self, headers: Headers) -> WeightFormat:
        return FP8_PER_ROW


registry.register("fp8_per_row", Fp8PerRow())
