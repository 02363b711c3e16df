"""FP8 with a scale per output row ("channel") or per matrix ("tensor"): GLM-4.7-FP8, ModelOpt's FP8, Mistral's own files.

An expert's tensors are {base}.{E}.{gate,up,down}_proj or {base}.{E}.{w1,w3,w2} and

    weight        F8_E4M3 [N, K]
    weight_scale  F32, BF16 or F16 [N, 1] or [N], or [] or [1]; or weight_scale_inv, or qscale_weight (Mistral)

A weight is its E4M3 number times its row's or its matrix's scale, whatever the scale's name says; it is kept in float32.
Activations stay bfloat16, whatever config.json says of quantizing them when the model runs. So an input_scale, activation_scale
or qscale_act may be there, and is not used.
"""

from __future__ import annotations

import math
from typing import ClassVar

from ktmoe.loaders import naming, registry
from ktmoe.loaders.per_expert import Headers, PerExpert, spellings
from ktmoe.weights.formats import FP8_PER_MATRIX, FP8_PER_ROW, WeightFormat

_ENDINGS = (".weight_scale", ".weight_scale_inv", ".qscale_weight")


class Fp8PerRow(PerExpert):
    """Reads E4M3 experts with one scale per row, or one per matrix."""

    names = naming.Names(
        "FP8 experts", *(each for ending in _ENDINGS for each in spellings({"codes": ".weight", "factor": ending}))
    )
    dtypes: ClassVar = {"codes": ("F8_E4M3",)}

    def format(self, headers: Headers) -> WeightFormat:
        return FP8_PER_MATRIX if math.prod(headers.info("factor").shape) == 1 else FP8_PER_ROW


registry.register("fp8_per_row", Fp8PerRow())
