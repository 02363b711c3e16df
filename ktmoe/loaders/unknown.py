"""What a checkpoint is that no loader reads, in words: how it is quantized, what its experts are called."""

from __future__ import annotations

import re
from typing import Any

from ktmoe.errors import CheckpointError
from ktmoe.loaders import checks, model_config
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.messages import show

#: Names of routed experts' tensors that no loader reads, what has them, and what to do.
SCHEMES = {
    re.compile(r"blk\.[0-9]+\.ffn_(?:gate|up|down)(?:_bwd)?_exps\.[0-9]+\.numa\.[0-9]+\.(?:weight|scale)"): (
        "weights that kt-kernel has converted to tiles of its own kernels, cut for a number of NUMA nodes: "
        "take the checkpoint that they were made from"
    ),
}
#: What config.json's quant_method says where no loader reads it, and what its weights are.
METHODS = {
    "aqlm": "codebooks of several levels",
    "auto-round": "weights that AutoRound packs in another way than GPTQ's or AWQ's",
    "bitnet": "ternary weights",
    "bitsandbytes": "NF4, FP4 or INT8 with statistics of their own",
    "eetq": "INT8 in an order that its GPU kernels want",
    "exl2": "ExLlamaV2's mix of 2 to 8 bits",
    "exl3": "ExLlamaV3's trellis codes",
    "higgs": "codebooks over rotated weights",
    "hqq": "integers with groups along either axis",
    "quanto": "packed tensors with shifts",
    "quip": "codebooks over rotated weights",
    "spqr": "integers with sparse outliers",
    "torchao": "tensors of torch's own classes",
    "vptq": "vectors from codebooks",
}


#: What names of routed experts have in them, the surest first.
_EXPERTS = (".experts.", "expert", "_moe.", ".moe.")


def method(checkpoint: Checkpoint) -> str:
    """What config.json calls the way of quantizing, as the end of a sentence; empty if it says nothing."""
    stated = _quantization(checkpoint)
    name = stated.get("quant_method")
    if name is None:
        return ""
    about = METHODS.get(name.lower().replace("_", "-")) or METHODS.get(name.lower()) if isinstance(name, str) else None
    return f"; config.json says quant_method {show(name)}" + (f", which is {about}, and is not supported" if about else "")


def found(checkpoint: Checkpoint) -> str:
    """What the checkpoint holds instead of experts that a loader knows."""
    for scheme, about in SCHEMES.items():
        if name := next(filter(scheme.fullmatch, checkpoint.names()), None):
            return f"{show(name)}, {about}"
    names = checkpoint.names()
    name = next((name for word in _EXPERTS for name in names if word in name and "shared" not in name), None)
    if name is None:
        return f"no tensor of routed experts among {len(checkpoint)}: a dense model{method(checkpoint)}"
    try:
        tensor = f"{show(name)} {checks.describe(checkpoint.info(name))}"
    except CheckpointError as error:  # a file that has not been downloaded, or that is no good
        tensor = f"{show(name)} ({error})"
    return f"experts with tensors such as {tensor}{method(checkpoint)}"


def _quantization(checkpoint: Checkpoint) -> dict[str, Any]:
    stated = model_config.value(checkpoint, "quantization_config")
    return stated if isinstance(stated, dict) else {}
