"""AWQ (AutoAWQ and AutoRound, version "gemm"): 4-bit integers with zero points, in groups along k.

A matrix, an expert's {E}.{gate,up,down}_proj or {E}.{w1,w3,w2} or any other, has the tensors

    qweight  I32 [K, N/8], eight codes along n: from the lowest bits up, those of n = 0, 2, 4, 6, 1, 3, 5, 7
    qzeros   I32 [K/group, N/8], zero points in the same order
    scales   F16 or BF16 [K/group, N]

A weight is (code - zero point) * scale, also where config.json's zero_point is false: AutoRound writes zero points of 8 then.
Of quantization_config: bits 4; version "gemm"; group_size, else it is found by the shapes.
"""

from __future__ import annotations

from typing import ClassVar

from ktmoe.loaders import checks, quantization, registry
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.per_expert import PerExpert
from ktmoe.loaders.scheme import Endings, Headers, Scheme, group
from ktmoe.weights.formats import WeightFormat, uint4
from ktmoe.weights.order import AWQ

_ARRAYS = {"codes": ".qweight", "scales": ".scales", "offsets": ".qzeros"}
_SUPPORTED = {
    "quant_method": ("awq", "auto-round", None),
    "bits": (4,),
    "version": ("gemm", "GEMM"),
    "zero_point": (True, False),
    "packing_format": ("auto_round:auto_awq", "auto_round:awq", None),
}


class Awq(Scheme):
    """4-bit AWQ."""

    stored = (Endings(_ARRAYS, foreign={"g_idx": "that is GPTQ's"}),)
    dtypes: ClassVar = {"codes": ("I32",)}

    def check_config(self, checkpoint: Checkpoint) -> None:
        quantization.check(checkpoint, _SUPPORTED)

    def format(self, headers: Headers) -> WeightFormat:
        codes, kind = headers.info("codes"), headers.kind("F16", "BF16")
        checks.dtype(codes, "I32")
        checks.dimensions(codes, 2)
        return uint4(quantization.group_size(headers.checkpoint) or group(headers, codes.shape[0], axis=0), kind, AWQ)


registry.register("awq", PerExpert(Awq(), "AWQ"))
