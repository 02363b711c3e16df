"""kt-kernel's method and mode names: which exist, which ktmoe serves, and what the others lack."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ktmoe import arrays
from ktmoe.errors import FormatError, InputError, UnavailableError
from ktmoe.quantization import Quantizer
from ktmoe.weights.formats import BF16, FP8_PER_ROW, MXFP4, MXFP8, WeightFormat, fp8, int4, nvfp4
from ktmoe.weights.ggml import GGML
from ktmoe.weights.order import GPTQ


def _rawint4(found: WeightFormat) -> bool:
    return bool(found.scale) and found.scale.kind == "bf16" and found == int4(found.scale.extent[1])


def _gptq_int4(found: WeightFormat) -> bool:
    if not found.scale:  # one group is the whole row
        return found == int4(order=GPTQ)
    return found == int4(found.scale.extent[1], found.scale.kind, GPTQ)


def _fp8(found: WeightFormat) -> bool:
    return bool(found.scale) and found.scale.extent[0] > 1 and found == fp8(found.scale.kind, found.scale.extent)


def _gguf(found: WeightFormat) -> bool:
    """Whether a format is that of a GGUF type, whatever factor it has: files of most types may have one or none."""
    return replace(found, factor=None) in [replace(of_type, factor=None) for of_type in GGML.values()]


@dataclass(frozen=True)
class Method:
    """wanted: what its experts' matrices are. fits: whether a format is that.

    exports: whether kt-kernel has host buffers for these weights. scales: what an item of their scale buffers is; None: there
    are none. rounds: how they are rounded when they are loaded; None: not at all. files: whether they come from files alone.
    """

    wanted: str
    fits: Callable[[WeightFormat], bool]
    scales: np.dtype | None = None
    exports: bool = True
    rounds: Quantizer | None = None
    files: bool = False


def _rounds(to: str, rule: str) -> Method:
    """A method that rounds: kt-kernel bfloat16 weights, ktmoe any that it reads. kt-kernel has no buffers for the result."""
    rounds = Quantizer(to, rule=rule)
    return Method(f"any, to be rounded to {rounds.format.description}", lambda _: True, exports=False, rounds=rounds)


_FP32 = np.dtype(np.float32)
_NVFP4 = (nvfp4(), nvfp4(divides=True))
#: The methods of mode "inference" that ktmoe serves, by name.
SERVED = {
    "BF16": Method("bfloat16", BF16.__eq__),
    "MXFP4": Method("E2M1 with a UE8M0 scale per 32", MXFP4.__eq__, arrays.BF16),
    "RAWINT4": Method("symmetric INT4 of compressed-tensors, with a bfloat16 scale per group", _rawint4, arrays.BF16),
    "FP8": Method("E4M3 with a scale per 128 x 128", _fp8, _FP32),
    "FP8_PERCHANNEL": Method("E4M3 with a scale per row", FP8_PER_ROW.__eq__, _FP32),
    "GPTQ_INT4": Method("GPTQ's symmetric INT4", _gptq_int4, exports=False),
    "MXFP8": Method("E4M3 with a UE8M0 scale per 32", MXFP8.__eq__, np.dtype(np.uint8)),
    "NVFP4": Method("E2M1 with an E4M3 scale per 16 and an fp32 scale per tensor", _NVFP4.__contains__, arrays.BF16),
    "LLAMAFILE": Method("weights as GGUF files have them", _gguf, exports=False, files=True),
    "AMXINT4": _rounds("int4", "amxint4"),
    "AMXINT8": _rounds("int8", "amxint8"),
    "MOE_INT4": _rounds("int4", "moe_int4"),
    "MOE_INT8": _rounds("int8", "moe_int8"),
}
#: method -> the weights that ktmoe does not have yet.
MISSING = {
    "SYCL_GPTQ_INT4": "GPTQ's symmetric INT4 on a SYCL device",
}


@dataclass(frozen=True)
class Tuning:
    """A method of mode "sft". weights: what they are, a key of SERVED. adapts: whether an adapter takes part.

    shared: whether kt-kernel lets an optimizer see the gradients where they are written (optimizer_gradients.py).
    """

    weights: str
    adapts: bool = True
    shared: bool = True


#: The methods of mode "sft" that ktmoe serves, by name.
TUNED = {
    "AMXBF16_SFT": Tuning("BF16"),
    "AMXBF16_SFT_SkipLoRA": Tuning("BF16", adapts=False, shared=False),
    "AMXFP8_SFT": Tuning("FP8"),
    "MXFP4_SFT": Tuning("MXFP4"),
    "RAWINT4_SFT": Tuning("RAWINT4"),
    "AMXINT4_KGroup_SFT": Tuning("RAWINT4"),
    "AMXINT4_KGroup_SFT_SkipLoRA": Tuning("RAWINT4", adapts=False, shared=False),
    "INT8_SFT": Tuning("AMXINT8"),
    "AMXINT8_SFT": Tuning("AMXINT8"),
    "AMXINT8_SFT_SkipLoRA": Tuning("AMXINT8", adapts=False, shared=False),
    "AMXINT4_SFT": Tuning("AMXINT4", shared=False),
    "AMXINT4_SFT_SkipLoRA": Tuning("AMXINT4", adapts=False, shared=False),
}
#: The methods of mode "sft" that kt-kernel 0.7.2 lists and refuses itself, since it has no class for them.
UNTUNED = tuple(f"AMXINT4_{kind}_SFT{suffix}" for kind in ("1", "1KGroup") for suffix in ("", "_SkipLoRA"))
#: mode -> its methods.
MODES = {"inference": (*SERVED, *MISSING), "sft": (*TUNED, *UNTUNED)}


def require(mode: str, method: str) -> None:
    """Raise InputError for a mode or method that does not exist, UnavailableError for one that ktmoe does not serve."""
    if mode not in MODES:
        raise InputError(f"mode must be one of {', '.join(map(repr, MODES))}, found {mode!r}")
    if method not in MODES[mode]:
        raise InputError(f"method must be one of {', '.join(sorted(MODES[mode]))} in mode {mode!r}, found {method!r}")
    works = f"what works in mode {mode!r} is method {', '.join(TUNED if mode == 'sft' else SERVED)}"
    if method in UNTUNED:
        raise UnavailableError(
            f"method {method!r}: kt-kernel 0.7.2 lists it and has no class for it, so that its weights are not known; {works}"
        )
    if method in MISSING:
        raise UnavailableError(f"method {method!r}: ktmoe does not have these weights yet: {MISSING[method]}; {works}")


def check_formats(name: str, method: Method, formats: Mapping[str, WeightFormat], experts: str) -> None:
    """Raise FormatError unless all projections are what the method stands for. name: the method's. experts: whose they are."""
    for projection, weight_format in formats.items():
        if not method.fits(weight_format):
            raise FormatError(
                f"{experts}: method {name!r} expects {method.wanted}, found {weight_format.description} ({projection})"
            )
