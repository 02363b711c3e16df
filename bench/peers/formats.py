"""The formats of weights that are compared, each in a session of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from ktmoe import synthetic


@dataclass(frozen=True)
class Format:
    """write: makes the checkpoint; it takes num_experts, hidden, intermediate and top_k. experts: of the layer, by default."""

    write: Callable[..., None]
    experts: int


#: The types of GGUF files that are compared, with 2 to 6.6 bits a weight.
GGUF = ("Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ2_XXS", "IQ3_XXS")

#: The formats, by the name that bench/models.py gives the weights. All have SwiGLU without a limit, as not every peer has one.
#: BF16 has half as many experts, so that every participant's own copy of them fits into 24 GB.
FORMATS = {
    "MXFP4": Format(functools.partial(synthetic.write_deepseek_v4, swiglu_limit=None), 64),
    "BF16": Format(synthetic.write_qwen3, 32),
    "FP8": Format(synthetic.write_fp8, 64),
    "INT4": Format(synthetic.write_kimi_k2, 64),
    **{f"GGUF {name}": Format(functools.partial(synthetic.write_gguf, types=name), 64) for name in GGUF},
}


def file_stem(what: str, weights: str) -> str:
    """What a file of a format's results or pictures is called."""
    return f"{what}-{weights.lower().replace(' ', '-')}"
