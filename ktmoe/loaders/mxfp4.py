"""MXFP4 with tensors of an expert's own: AMD Quark (amd/*), ModelOpt, compressed-tensors. E2M1, a UE8M0 scale per 32 along k.

An expert's tensors are {base}.{E}.{gate,up,down}_proj or {base}.{E}.{w1,w3,w2} and, by Quark and ModelOpt,

    weight         U8 [N, K/2], two E2M1 codes a byte, low nibble = even k; or F4 [N, K], the same bytes
    weight_scale   U8 or F8_E8M0 [N, K/32], bytes that mean 2**(b - 127)

By compressed-tensors ("mxfp4-pack-quantized"), weight_packed takes the place of weight.

Quark's other formats have other shapes or dtypes (FP6: U8 [N, 3K/4]; integers: I32) and are refused by these.
"""

from __future__ import annotations

from typing import ClassVar

from ktmoe.loaders import naming, registry
from ktmoe.loaders.per_expert import Headers, PerExpert, spellings
from ktmoe.weights.formats import MXFP4, WeightFormat


class Mxfp4(PerExpert):
    """Reads MXFP4 experts."""

    names = naming.Names(
        "MXFP4 experts",
        *spellings({"codes": ".weight", "scales": ".weight_scale"}),
        *spellings({"codes": ".weight_packed", "scales": ".weight_scale"}),
    )
    dtypes: ClassVar = {"codes": ("U8", "F4")}

    def format(self, headers: Headers) -> WeightFormat:
        return MXFP4


registry.register("mxfp4", Mxfp4())
