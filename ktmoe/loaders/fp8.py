"""FP8 with a scale per block of 128x128: DeepSeek-V3, R1 and V3.2, Kimi-K2, Qwen3-FP8, MiniMax-M2, compressed-tensors' "block".

A matrix, an expert's {E}.{gate,up,down}_proj or {E}.{w1,w3,w2} or any other, has the tensors

    weight            F8_E4M3 [N, K]
    weight_scale_inv  F32, BF16 or F8_E8M0 [ceil(N/128), ceil(K/128)], or weight_scale; ModelOpt's is [N/128, 1, K/128, 1]

Or, with all experts in one tensor, gate rows before up rows (transformers' models that keep theirs so):

    {base}.gate_up_proj            F8_E4M3 [E, 2I, H]; gate_up_proj_scale_inv as above, [E, 2I/128, ceil(H/128)]
    {base}.down_proj               F8_E4M3 [E, H, I], and down_proj_scale_inv likewise

These may be transposed, as the bf16 loader's: [E, H, 2I] and [E, I, H], and scales likewise.

A weight is its E4M3 number times its block's scale, whatever the scale's name says. weight_block_size in config.json's
quantization_config is the block's size where it is given.
"""

from __future__ import annotations

from typing import ClassVar

from ktmoe.loaders import naming, quantization, registry
from ktmoe.loaders.per_expert import spellings
from ktmoe.loaders.scheme import Endings, Headers, Scheme
from ktmoe.loaders.stacked import STACKED, Stacked
from ktmoe.weights.formats import WeightFormat, fp8


class Fp8(Scheme):
    """E4M3 with one scale per block."""

    stored = tuple(Endings({"codes": ".weight", "scales": ending}) for ending in (".weight_scale_inv", ".weight_scale"))
    dtypes: ClassVar = {"codes": ("F8_E4M3",)}

    def format(self, headers: Headers) -> WeightFormat:
        return fp8(headers.kind("F32", "BF16", "F8_E8M0"), quantization.block_size(headers.checkpoint))


_FUSED = naming.Spelling(naming.FUSED_STEMS, ("", "_scale_inv"), arrays={"codes": "", "scales": "_scale_inv"}, **STACKED)

registry.register("fp8", Stacked(Fp8(), "FP8 experts", (*spellings(Fp8.stored), _FUSED)))
