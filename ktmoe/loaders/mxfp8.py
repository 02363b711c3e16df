"""MXFP8: MiniMax-M3, and others that have E4M3 with a UE8M0 scale per 32 along k.

A matrix, an expert's {E}.{gate,up,down}_proj or {E}.{w1,w3,w2} or any other, has the tensors

    weight            F8_E4M3 [N, K]
    weight_scale_inv  U8 or F8_E8M0 [N, K/32], bytes that mean 2**(b - 127), or weight_scale

A weight is its E4M3 number times its scale, whatever the scale's name says. MiniMax-M3's config has hidden_act "swigluoai",
swiglu_alpha and swiglu_limit; its gate and up are not interleaved.
"""

from __future__ import annotations

from typing import ClassVar

from ktmoe.loaders import registry
from ktmoe.loaders.per_expert import PerExpert
from ktmoe.loaders.scheme import Endings, Headers, Scheme
from ktmoe.weights.formats import MXFP8, WeightFormat


class Mxfp8(Scheme):
    """MXFP8."""

    stored = tuple(Endings({"codes": ".weight", "scales": ending}) for ending in (".weight_scale_inv", ".weight_scale"))
    dtypes: ClassVar = {"codes": ("F8_E4M3",)}

    def format(self, headers: Headers) -> WeightFormat:
        return MXFP8


registry.register("mxfp8", PerExpert(Mxfp8(), "MXFP8 experts"))
