"""kt-kernel's method and mode names: which exist, which ktmoe serves, and what the others lack."""

from __future__ import annotations

from collections.abc import Mapping

from ktmoe.errors import FormatError, InputError, UnavailableError
from ktmoe.weights.elements import INT4
from ktmoe.weights.formats import BF16, MXFP4, WeightFormat

#: method -> what its experts' matrices are.
SERVED = {
    "BF16": "bfloat16",
    "MXFP4": "E2M1 with a UE8M0 scale per 32",
    "RAWINT4": "symmetric INT4 of compressed-tensors, with a bfloat16 scale per group",
}
_ROWS = "symmetric integers with an fp32 scale per row, quantized or converted by kt-kernel"
#: method -> the weights that ktmoe does not have yet.
MISSING = {
    "AMXINT4": f"4-bit {_ROWS}",
    "AMXINT8": f"8-bit {_ROWS}",
    "FP8": "E4M3 with a scale per 128 x 128",
    "FP8_PERCHANNEL": "E4M3 with a scale per row",
    "GPTQ_INT4": "GPTQ's symmetric INT4",
    "LLAMAFILE": "GGUF",
    "MOE_INT4": f"4-bit {_ROWS}",
    "MOE_INT8": f"8-bit {_ROWS}",
    "MXFP8": "E4M3 with a UE8M0 scale per 32",
    "NVFP4": "E2M1 with an E4M3 scale per 16 and an fp32 scale per tensor",
    "SYCL_GPTQ_INT4": "GPTQ's symmetric INT4 on a SYCL device",
}
_SFT = ("AMXBF16", "AMXINT8", "AMXINT4", "AMXINT4_1", "AMXINT4_KGroup", "AMXINT4_1KGroup")
SFT = (
    *(f"{name}_SFT{suffix}" for name in _SFT for suffix in ("", "_SkipLoRA")),
    *(f"{name}_SFT" for name in ("AMXFP8", "INT8", "MXFP4", "RAWINT4")),
)
#: mode -> its methods.
MODES = {"inference": (*SERVED, *MISSING), "sft": SFT}


def require(mode: str, method: str) -> None:
    """Raise InputError for a mode or method that does not exist, UnavailableError for one that ktmoe does not serve."""
    if mode not in MODES:
        raise InputError(f"mode must be one of {', '.join(map(repr, MODES))}, found {mode!r}")
    if method not in MODES[mode]:
        raise InputError(f"method must be one of {', '.join(sorted(MODES[mode]))} in mode {mode!r}, found {method!r}")
    works = f"what works is mode 'inference' with method {', '.join(SERVED)}"
    if mode == "sft":
        raise UnavailableError(f"mode 'sft' (method {method!r}): ktmoe has no backward pass and no LoRA; {works}")
    if method in MISSING:
        raise UnavailableError(f"method {method!r}: ktmoe does not have these weights yet: {MISSING[method]}; {works}")


def check_formats(method: str, formats: Mapping[str, WeightFormat], name: str) -> None:
    """Raise FormatError unless all projections are what the method stands for."""
    for projection, weight_format in formats.items():
        if not _fits(method, weight_format):
            raise FormatError(
                f"{name}: method {method!r} expects {SERVED[method]}, found {weight_format.description} ({projection})"
            )


def _fits(method: str, weight_format: WeightFormat) -> bool:
    if method == "RAWINT4":
        scale = weight_format.scale
        return weight_format.element == INT4 and scale is not None and scale.kind == "bf16"
    return weight_format == {"BF16": BF16, "MXFP4": MXFP4}[method]
