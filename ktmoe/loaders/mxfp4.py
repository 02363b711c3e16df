"""MXFP4 with tensors of an expert's own: AMD Quark (amd/*), ModelOpt, compressed-tensors. E2M1, a UE8M0 scale per 32 along k.

A matrix, an expert's {E}.{gate,up,down}_proj or {E}.{w1,w3,w2} or any other, has the tensors, by Quark and ModelOpt,

    weight         U8 [N, K/2], two E2M1 codes a byte, low nibble = even k; or F4 [N, K], the same bytes
    weight_scale   U8 or F8_E8M0 [N, K/32], bytes that mean 2**(b - 127)

By compressed-tensors ("mxfp4-pack-quantized"), weight_packed takes the place of weight.

Quark's other formats have other shapes or dtypes (FP6: U8 [N, 3K/4]; integers: I32) and are refused by these.
"""

from __future__ import annotations

from typing import ClassVar

from ktmoe.loaders import registry
from ktmoe.loaders.per_expert import PerExpert
from ktmoe.loaders.scheme import Endings, Headers, Scheme
from ktmoe.weights.formats import MXFP4, WeightFormat


class Mxfp4(Scheme):
    """MXFP4."""

    stored = tuple(Endings({"codes": ending, "scales": ".weight_scale"}) for ending in (".weight", ".weight_packed"))
    dtypes: ClassVar = {"codes": ("U8", "F4")}

    def format(self, headers: Headers) -> WeightFormat:
        return MXFP4


registry.register("mxfp4", PerExpert(Mxfp4(), "MXFP4 experts"))
