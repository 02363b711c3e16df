"""GPTQ (AutoGPTQ, GPTQModel, AutoRound): 4-bit integers, symmetric or with zero points, in groups along k.

A matrix, an expert's {E}.{gate,up,down}_proj or {E}.{w1,w3,w2} or any other, has the tensors

    qweight  I32 [K/8, N], eight codes along k, lowest bits first
    scales   F16 or BF16 [K/group, N]; [1, N] if group_size is -1, all of a row
    qzeros   I32 [K/group, N/8], eight zero points along n, lowest bits first
    g_idx    I32 [K], each k's group; may be absent, and must be k // group

A weight is (code - z) * scale. What qzeros store is z - 1, or z where quantization_config's checkpoint_format is "gptq_v2" or
its packing_format is "auto_round". If its sym is true or left out, every z must be 8. group_size may be left out; activation
order (desc_act) is refused.

Where z - 1 is stored, 15 is refused. It is what writers make of z = 0, and then the zero points beside it are wrong, too:
GPTQModel subtracts from eight as one integer and so borrows, and AutoGPTQ sets all bits above.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from ktmoe.errors import FormatError
from ktmoe.loaders import checks, quantization, registry
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.per_expert import PerExpert
from ktmoe.loaders.scheme import Endings, Headers, Scheme, group
from ktmoe.matrix import Matrix
from ktmoe.weights.elements import INT4
from ktmoe.weights.formats import WeightFormat, int4, uint4
from ktmoe.weights.order import GPTQ
from ktmoe.weights.scales import Factor

_ARRAYS = {"codes": ".qweight", "scales": ".scales", "factor": ".scales", "offsets": ".qzeros"}
_SUPPORTED = {
    "quant_method": ("gptq", "auto-round", None),
    "bits": (4,),
    "desc_act": (False, None),
    "sym": (True, False, None),
    "checkpoint_format": ("gptq", "gptq_v2", None),
    "packing_format": ("auto_round:auto_gptq", "auto_round:gptq", "auto_round", None),
}


class Gptq(Scheme):
    """4-bit GPTQ without activation order."""

    stored = (Endings(_ARRAYS, optional=(".g_idx",)),)
    dtypes: ClassVar = {"codes": ("I32",)}

    def check_config(self, checkpoint: Checkpoint) -> None:
        quantization.check(checkpoint, _SUPPORTED, also=(-1,))

    def format(self, headers: Headers) -> WeightFormat:
        codes, kind, checkpoint = headers.info("codes"), headers.kind("F16", "BF16"), headers.checkpoint
        checks.dtype(codes, "I32")
        checks.dimensions(codes, 2)
        symmetric = quantization.read(checkpoint).get("sym") is not False
        if quantization.read(checkpoint).get("group_size") == -1:
            if not symmetric:
                raise FormatError(f"{headers.tensor('offsets')}: expected zero points in groups, found one per row")
            return WeightFormat(INT4, factor=Factor(per_row=True), order=GPTQ)
        size = quantization.group_size(checkpoint) or group(headers, 8 * codes.shape[0], axis=0)
        if symmetric:
            return int4(size, kind, GPTQ)
        return uint4(size, kind, GPTQ, plus=_plus(checkpoint))

    def check_more(self, headers: Headers, endings: Iterable[str], shape: tuple[int, int]) -> None:
        (n, k), zeros = shape, headers.info("offsets")
        checks.dtype(zeros, "I32")
        checks.shape(zeros, (headers.info("scales").shape[0], -(-n // 8)), "eight zero points an item")
        if ".g_idx" in endings:
            index = headers.checkpoint.info(f"{headers.name}.g_idx")
            checks.dtype(index, "I32")
            checks.shape(index, (k,), "one group per k")

    def check_read(self, matrix: Matrix, headers: Headers, endings: Iterable[str]) -> None:
        checkpoint, scale = headers.checkpoint, matrix.format.scale
        size = scale.extent[1] if scale else matrix.shape[1]
        if ".g_idx" in endings:
            name = f"{headers.name}.g_idx"
            index = checkpoint.read(name, release=True).view("<i4")
            if (wrong := np.flatnonzero(index != np.arange(len(index)) // size)).size:
                k = int(wrong[0])
                raise FormatError(f"{name}: [{k}]: expected {k // size}, groups in order, found {index[k]}: activation order")
        plus, offsets = _plus(checkpoint), matrix.offsets
        name, symmetric = headers.tensor("offsets"), offsets is None
        stored = checkpoint.read(name, release=True) if offsets is None else offsets.view(np.uint8)
        nibbles = np.stack([stored & 15, stored >> 4])
        if symmetric and (wrong := nibbles[nibbles != 8 - plus]).size:
            raise FormatError(f"{name}: expected {8 - plus} everywhere, as sym says, found {wrong[0]}")
        if not symmetric and plus and (nibbles == 15).any():
            raise FormatError(f"{name}: expected zero points from 1 to 15, found 16 or 0: what is stored, 15, is ambiguous")


def _plus(checkpoint: Checkpoint) -> int:
    stated = quantization.read(checkpoint)
    return 0 if stated.get("checkpoint_format") == "gptq_v2" or stated.get("packing_format") == "auto_round" else 1


registry.register("gptq", PerExpert(Gptq(), "GPTQ"))
