"""MXFP8: MiniMax-M3, and others that have E4M3 with a UE8M0 scale per 32 along k.

An expert's tensors are {base}.{E}.{gate,up,down}_proj or {base}.{E}.{w1,w3,w2} and

    weight            F8_E4M3 [N, K]
    weight_scale_inv  U8 or F8_E8M0 [N, K/32], bytes that mean 2**(b - 127), or weight_scale

A weight is its E4M3 number times its scale, whatever the scale's name says. MiniMax-M3's config has hidden_act "swigluoai",
swiglu_alpha and swiglu_limit; its gate and up are not interleaved.
"""

from __future__ import annotations

from typing import ClassVar

from ktmoe.loaders import naming, registry
from ktmoe.loaders.per_expert import Headers, PerExpert, spellings
from ktmoe.weights.formats import MXFP8, WeightFormat


class Mxfp8(PerExpert):
    """Reads MXFP8 experts."""

    names = naming.Names(
        "MXFP8 experts",
        *spellings({"codes": ".weight", "scales": ".weight_scale_inv"}),
        *spellings({"codes": ".weight", "scales": ".weight_scale"}),
    )
    dtypes: ClassVar = {"codes": ("F8_E4M3",)}

    def format(self, headers: Headers) -> WeightFormat:
        return MXFP8


registry.register("mxfp8", Mxfp8())
