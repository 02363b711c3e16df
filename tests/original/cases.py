"""The layers and batches with which kt-kernel, the numpy model of its roundings and ktmoe are compared."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import rounding
from helpers import BF16, random_experts
from rounding import KT_KERNEL, Roundings

from ktmoe import BF16 as B16
from ktmoe import MXFP4, SILU, ExpertWeights, GatedActivation, MoELayer, WeightFormat, int4, reference

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 8, 256, 192, 4
TOKENS = (1, 2, 7, 64, 200)
MOST_TOKENS = max(TOKENS)
#: Scales for g and u of a few units, so that clamps at 1 or 2 have much to do.
WIDE = (121, 125)


@dataclass(frozen=True)
class Format:
    """kinds: kt-kernel's classes for it, and where each rounds. group: of k that share a scale; 0 without."""

    weights: WeightFormat
    group: int
    kinds: dict[str, Roundings]


VNNI = Roundings(sums=True, int8_group=32)
FORMATS = {
    "MXFP4": Format(MXFP4, 32, {"AMXFP4_KGroup_MOE": KT_KERNEL, "AVX2MXFP4_MOE": KT_KERNEL}),
    "RAWINT4": Format(
        int4(32),
        32,
        {
            "AMXInt4_KGroup_MOE": VNNI,
            "AMXInt4_KGroupBlocked_MOE": VNNI,
            "AVXVNNI256RawInt4_MOE": VNNI,
            "AVX2RawInt4_MOE": KT_KERNEL,
        },
    ),
    "BF16": Format(B16, 0, {"AMXBF16_MOE": KT_KERNEL, "AVX2BF16_MOE": KT_KERNEL}),
}
KINDS = {kind: (name, roundings) for name, format in FORMATS.items() for kind, roundings in format.kinds.items()}


@dataclass(frozen=True)
class Clamps:
    """kt-kernel's swiglu_limit and swiglu_alpha, 0 for none, and what they are here."""

    limit: float
    alpha: float
    activation: GatedActivation

    @property
    def below(self) -> bool:
        return self.alpha > 0


CLAMPS = {
    "silu": Clamps(0.0, 0.0, SILU),
    "limit": Clamps(1.0, 0.0, GatedActivation(limit=1.0)),
    "alpha": Clamps(2.0, 1.702, GatedActivation(alpha=1.702, limit=2.0, up_offset=1.0)),
}
#: On kt-kernel's GPU: skipped here.
ON_GPU = np.arange(EXPERTS) == 2
#: Slot i has the checkpoint's expert of that number; one is there twice.
MOVED = np.array([3, 0, 0, 7, 1, 2, 6, 5])


@functools.cache
def experts(name: str, clamps: str = "silu") -> ExpertWeights:
    wide = {} if clamps == "silu" else {"scales": WIDE}
    rng, form = np.random.default_rng(len(name + clamps)), FORMATS[name].weights
    return random_experts(rng, EXPERTS, HIDDEN, INTERMEDIATE, formats=form, activation=CLAMPS[clamps].activation, **wide)


@functools.cache
def batch() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, ids, weights of batches of TOKENS, one after the other: what is expected of a token is the same in any batch.

    Of ids some are none's: below zero, as many as experts, huge; of tokens that are not alone in their batch some have an
    expert twice, which kt-kernel gets wrong for one token alone.
    """
    rng, tokens = np.random.default_rng(TOKENS), sum(TOKENS)
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)]).astype(np.int64)
    ids[1::3, 1] = ids[1::3, 0]
    for nobody in (-1, EXPERTS, 10**9):
        ids[rng.random(ids.shape) < 0.04] = nobody
    return rng.standard_normal((tokens, HIDDEN)).astype(BF16), ids, rng.standard_normal((tokens, TOP_K)).astype(np.float32)


def batches() -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The parts of batch(): of each number of TOKENS."""
    ends = np.cumsum(TOKENS)[:-1]
    return [*zip(*(np.split(array, ends) for array in batch()), strict=True)]


@functools.cache
def expected(name: str, clamps: str, roundings: Roundings) -> tuple[reference.Reference, np.ndarray]:
    """Of batch(): kt-kernel's result by the model, and how far ktmoe's own y, float64, can be from what kt-kernel returns."""
    roundings = replace(roundings, clamps_below=CLAMPS[clamps].below)
    arguments = experts(name, clamps), *batch(), roundings
    return rounding.forward(*arguments, skip=ON_GPU), rounding.apart(*arguments, skip=ON_GPU)


@functools.cache
def own(name: str, clamps: str, activations: str = "bf16", rounding: str = "exact") -> reference.Reference:
    """Of batch(): ktmoe's, in one of its modes."""
    options = {"expert_mask": ~ON_GPU, "activations": activations, "rounding": rounding}
    return reference.forward(experts(name, clamps), *batch(), **options)


def forward(name: str, clamps: str, backend: str) -> tuple[np.ndarray, np.ndarray]:
    """A backend's output for batch(), float64, and how far it can be from y with bfloat16 activations and exact scales."""
    with MoELayer(experts(name, clamps), backend) as layer:
        layer.expert_mask[:] = ~ON_GPU
        ours = np.concatenate([layer.forward(*part) for part in batches()]).astype(np.float64)
        mode = own(name, clamps, layer.activations, layer.rounding)
    assert mode.worst(ours) <= 1
    return ours, mode.bound + np.abs(mode.y - own(name, clamps).y)
