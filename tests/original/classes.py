"""kt-kernel's classes with the experts of cases.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cases import CLAMPS, EXPERTS, FORMATS, MOST_TOKENS, ON_GPU, TOP_K, loaded, originals
from original import Original

from ktmoe import ExpertWeights

IDENTITY = np.arange(EXPERTS)


def made(weights: ExpertWeights, name: str, kind: str, clamps: str = "silu", **options) -> Original:
    """kt-kernel with these experts as its layer "layer"."""
    original = Original(weights)
    sizes = [EXPERTS, TOP_K, weights.hidden, weights.intermediate]
    keywords = {"mask": ON_GPU, "logical": IDENTITY, "most_tokens": MOST_TOKENS} | options
    limits = {"limit": CLAMPS[clamps].limit, "alpha": CLAMPS[clamps].alpha}
    original.layer(name="layer", kind=kind, sizes=sizes, quantization=dict(FORMATS[name].quantization), **limits, **keywords)
    return original


def given(name: str, clamps: str = "silu") -> ExpertWeights:
    """What kt-kernel's class is given: it rounds by itself."""
    return originals(name, clamps) if FORMATS[name].rounds else loaded(name, clamps)


def saved(name: str, folder: Path) -> dict[str, str]:
    """The arguments that say where a class saves what it rounds, if it rounds."""
    return {"rounded": str(folder)} if FORMATS[name].rounds else {}


def need(exists: set[str], kind: str) -> None:
    if kind not in exists:
        pytest.skip(f"this CPU lacks what kt-kernel's {kind} needs")
