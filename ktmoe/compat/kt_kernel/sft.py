"""kt_kernel.sft: what callers import from there to train, or to serve an adapter. There are none of kt-kernel's torch layers.

The functions are those that the fork sglang-kt calls for --kt-expert-lora-path.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

from ktmoe.compat.sft import SFTWrapper
from ktmoe.compat.sft_weights import OfFiles
from ktmoe.errors import InputError

__all__ = [
    "AMXSFTMoEWrapper",
    "BaseSFTMoEWrapper",
    "MOEArchConfig",
    "get_fp8_runtime",
    "get_mxfp4_runtime",
    "get_rawint4_checkpoint_contract",
    "get_rawint4_runtime",
    "load_block_fp8_experts_from_checkpoint_files",
    "load_rawint4_experts_from_checkpoint_files",
]

#: The class of KTMoEWrapper(mode="sft"), and what that is derived from in kt-kernel.
AMXSFTMoEWrapper = BaseSFTMoEWrapper = SFTWrapper

#: A model's names and sizes, by keyword. ktmoe's loaders find them in the checkpoint.
MOEArchConfig = SimpleNamespace


def get_rawint4_runtime() -> str:
    """The method whose weights can be trained and served on this CPU, as on any that ktmoe runs on; kt-kernel may raise."""
    return "RAWINT4_SFT"


def get_mxfp4_runtime() -> str:
    """The method for weights in MXFP4, which can be trained and served on this CPU."""
    return "MXFP4_SFT"


def get_fp8_runtime() -> str:
    """The method for weights in FP8, which can be trained and served on this CPU."""
    return "AMXFP8_SFT"


def get_rawint4_checkpoint_contract(config: Mapping) -> Mapping:
    """config.json as it is: what the tensors themselves are is checked when they are loaded."""
    return config


def load_rawint4_experts_from_checkpoint_files(*, checkpoint_files: Sequence[str], layer_idx: int, **_known) -> OfFiles:
    """What SFTWrapper.load_rawint4_weights() takes: these files' layer, which it reads. Raises InputError for no files.

    checkpoint_files: of one folder. _known: kt-kernel's other arguments, which the checkpoint says itself.
    """
    if not checkpoint_files:
        raise InputError(f"layer {layer_idx}: checkpoint_files must name files, found none")
    return OfFiles(os.path.dirname(checkpoint_files[0]), layer_idx)


#: What SFTWrapper.load_block_fp8_weights() takes.
load_block_fp8_experts_from_checkpoint_files = load_rawint4_experts_from_checkpoint_files
