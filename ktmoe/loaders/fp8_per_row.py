"""FP8 with a scale per output row ("channel") or per matrix ("tensor"): GLM-4.7-FP8, ModelOpt's FP8, Mistral's own files.

A matrix, an expert's {E}.{gate,up,down}_proj or {E}.{w1,w3,w2} or any other, has the tensors

    weight        F8_E4M3 [N, K]
    weight_scale  F32, BF16 or F16 [N, 1] or [N], or [] or [1]; or weight_scale_inv, or qscale_weight (Mistral)

Or, with all experts in one tensor (Llama-4 in transformers' fbgemm_fp8), columns of gate before those of up:

    {base}.gate_up_proj    F8_E4M3 [E, H, 2I], and gate_up_proj_scale F32 [E, 1, 2I]
    {base}.down_proj       F8_E4M3 [E, I, H], and down_proj_scale F32 [E, H, 1]

Or (Mistral-Small-4 in transformers) one scale per expert, and rows:

    {base}.gate_up_proj    F8_E4M3 [E, 2I, H], and gate_up_proj_scale_inv [E, 1, 1], of both
    {base}.down_proj       F8_E4M3 [E, H, I], and down_proj_scale_inv [E, 1, 1]

Or (Llama-4 by ModelOpt) one scale for all experts, and columns of gate before those of up:

    {base}.gate_up_proj    F8_E4M3 [E, H, 2I], and gate_up_proj_weight_scale F32 []
    {base}.down_proj       F8_E4M3 [E, I, H], and down_proj_weight_scale F32 []

A weight is its E4M3 number times its row's or its matrix's scale, whatever the scale's name says; it is kept in float32.
Activations stay bfloat16, whatever config.json says of quantizing them when the model runs. So an input_scale, activation_scale
or qscale_act may be there, and is not used.
"""

from __future__ import annotations

import math
from typing import ClassVar

from ktmoe.loaders import naming, registry
from ktmoe.loaders.per_expert import spellings
from ktmoe.loaders.scheme import Endings, Headers, Scheme
from ktmoe.loaders.stacked import STACKED, Stacked
from ktmoe.weights.formats import FP8_PER_MATRIX, FP8_PER_ROW, WeightFormat


class Fp8PerRow(Scheme):
    """E4M3 with one scale per row, or one per matrix."""

    stored = tuple(
        Endings({"codes": ".weight", "factor": ending}) for ending in (".weight_scale", ".weight_scale_inv", ".qscale_weight")
    )
    dtypes: ClassVar = {"codes": ("F8_E4M3",)}

    def format(self, headers: Headers) -> WeightFormat:
        shape = headers.info("factor").shape
        return FP8_PER_MATRIX if math.prod(shape[1:] if len(shape) == 3 else shape) == 1 else FP8_PER_ROW


_FUSED = (
    naming.Spelling(naming.FUSED_STEMS, ("", ending), arrays={"codes": "", "factor": ending}, **STACKED)
    for ending in ("_scale", "_scale_inv", "_weight_scale")
)

registry.register("fp8_per_row", Stacked(Fp8PerRow(), "FP8 experts", (*spellings(Fp8PerRow.stored), *_FUSED)))
