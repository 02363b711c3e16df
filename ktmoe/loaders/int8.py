"""INT8, symmetric: compressed-tensors' "int-quantized" (W8A8), DeepSeek-R1-Channel-INT8 and -Block-INT8, Quark.

A matrix, an expert's {E}.{gate,up,down}_proj or {E}.{w1,w3,w2} or any other, has the tensors

    weight        I8 [N, K]
    weight_scale  F32, BF16 or F16, or weight_scale_inv: [N, 1] or [N], one per row; [] or [1], one per matrix;
                  [N, K/group]; or one per block, [ceil(N/128), ceil(K/128)]

A weight is its integer times its scale, whatever the scale's name says. group_size and weight_block_size of config.json's
quantization_config count where they are given. Activations stay bfloat16 by default, whatever config.json says of quantizing
them when the model runs. So an input_scale may be there, and is not used.
"""

from __future__ import annotations

import math
from typing import ClassVar

from ktmoe.loaders import checks, quantization, registry
from ktmoe.loaders.per_expert import PerExpert
from ktmoe.loaders.scheme import Endings, Headers, Scheme, group
from ktmoe.weights.elements import INT8
from ktmoe.weights.formats import WeightFormat, int8
from ktmoe.weights.scales import Factor, Scale

_FOREIGN = {"weight_zero_point": "asymmetric quantization to 8 bits is not supported"}


class Int8(Scheme):
    """INT8 with a scale per row, matrix, group or block."""

    stored = tuple(
        Endings({"codes": ".weight", "scales": ending, "factor": ending}, foreign=_FOREIGN)
        for ending in (".weight_scale", ".weight_scale_inv")
    )
    dtypes: ClassVar = {"codes": ("I8",)}

    def format(self, headers: Headers) -> WeightFormat:
        codes, scales = headers.info("codes"), headers.info("scales")
        checks.dtype(codes, "I8")
        checks.dimensions(codes, 2)
        n, k = codes.shape
        if len(scales.shape) < 2 or scales.shape == (n, 1):
            return WeightFormat(INT8, factor=Factor(per_row=math.prod(scales.shape) != 1))
        kind = headers.kind("F32", "BF16", "F16")
        if scales.shape[0] == n:
            return int8(quantization.group_size(headers.checkpoint) or group(headers, k, axis=1), kind)
        return WeightFormat(INT8, Scale(kind, quantization.block_size(headers.checkpoint)))


registry.register("int8", PerExpert(Int8(), "INT8 experts"))
