"""NVFP4, as NVIDIA ModelOpt and compressed-tensors call it: E2M1 with an E4M3 scale per 16 along k, and one number per matrix.

A matrix, an expert's {E}.{gate,up,down}_proj or {E}.{w1,w3,w2} or any other, has the tensors, by ModelOpt:

    weight               U8 [N, K/2], two E2M1 codes a byte, low nibble = even k
    weight_scale         F8_E4M3 [N, K/16]
    weight_scale_2       F32 [] or [1]: a weight is E2M1 * weight_scale * weight_scale_2
    input_scale          may be there, and is not used

By compressed-tensors:

    weight_packed        U8 [N, K/2], the same
    weight_scale         F8_E4M3 [N, K/16]
    weight_global_scale  F32 [1] or []: a weight is E2M1 * weight_scale / weight_global_scale
    input_global_scale   may be there, and is not used

The input's scales are for quantizing activations to four bits. Activations stay bfloat16 here, which is more precise.
"""

from __future__ import annotations

from typing import ClassVar

from ktmoe.loaders import registry
from ktmoe.loaders.per_expert import PerExpert
from ktmoe.loaders.scheme import Endings, Headers, Scheme
from ktmoe.weights.formats import WeightFormat, nvfp4

_MODELOPT = {"codes": ".weight", "scales": ".weight_scale", "factor": ".weight_scale_2"}
_COMPRESSED = {"codes": ".weight_packed", "scales": ".weight_scale", "factor": ".weight_global_scale"}


class Nvfp4(Scheme):
    """NVFP4."""

    stored = (Endings(_MODELOPT), Endings(_COMPRESSED))
    dtypes: ClassVar = {"codes": ("U8",), "scales": ("F8_E4M3",), "factor": ("F32",)}

    def format(self, headers: Headers) -> WeightFormat:
        return nvfp4(divides=headers.arrays is _COMPRESSED)


registry.register("nvfp4", PerExpert(Nvfp4(), "NVFP4 experts"))
