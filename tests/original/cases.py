"""The layers and batches with which kt-kernel, the numpy model of its roundings and ktmoe are compared."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import rounding
from helpers import BF16, random_experts
from rounding import KT_KERNEL, ROW, Roundings

from ktmoe import BF16 as B16
from ktmoe import MXFP4, SILU, ExpertWeights, GatedActivation, Matrix, MoELayer, WeightFormat, int4, reference
from ktmoe.quantization import Quantizer
from ktmoe.weights.elements import E2M1
from ktmoe.weights.formats import FP8_PER_ROW, MXFP8, fp8, nvfp4
from ktmoe.weights.order import GPTQ
from ktmoe.weights.scales import Scale

EXPERTS, HIDDEN, TOP_K = 8, 256, 4
TOKENS = (1, 2, 7, 64, 200)
MOST_TOKENS = -(-max(TOKENS) // 32) * 32  # some classes take no other number
#: Scales for g and u of a few units, so that clamps at 1 or 2 have much to do.
WIDE = (121, 125)


@dataclass(frozen=True)
class Format:
    """kinds: kt-kernel's classes for it, as its wrapper prefers them on CPUs without AMX, and where each rounds.

    quantization: what its quant_config says. intermediate: a size that its classes take. theirs: the format that its loader
    makes of these weights, where that rounds them. rounds: how both round bfloat16 weights.
    """

    weights: WeightFormat
    kinds: Mapping[str, Roundings]
    quantization: Mapping[str, object] = field(default_factory=dict)
    intermediate: int = 192
    theirs: WeightFormat | None = None
    rounds: Quantizer | None = None


VNNI = Roundings(sums=True, int8_group=32)
#: The formats, by kt-kernel's name of the method.
FORMATS = {
    "MXFP4": Format(MXFP4, {"AMXFP4_KGroup_MOE": KT_KERNEL, "AVX2MXFP4_MOE": KT_KERNEL}, {"bits": 4, "group_size": 32}),
    "RAWINT4": Format(
        int4(32),
        {
            "AMXInt4_KGroup_MOE": VNNI,
            "AMXInt4_KGroupBlocked_MOE": VNNI,
            "AVXVNNI256RawInt4_MOE": VNNI,
            "AVX2RawInt4_MOE": KT_KERNEL,
        },
        {"bits": 4, "group_size": 32},
    ),
    "BF16": Format(B16, {"AMXBF16_MOE": KT_KERNEL, "AVX2BF16_MOE": KT_KERNEL}),
    "FP8": Format(fp8(), {"AMXFP8_MOE": KT_KERNEL, "AVX2FP8_MOE": KT_KERNEL}, {"bits": 8, "group_size": 128}, 256),
    "FP8_PERCHANNEL": Format(FP8_PER_ROW, {"AMXFP8PerChannel_MOE": KT_KERNEL}, {"bits": 8, "per_channel": True}, 256),
    "MXFP8": Format(MXFP8, {"AVX2MXFP8_MOE": KT_KERNEL, "AMXMXFP8_KGroup_MOE": KT_KERNEL}, {"bits": 8, "group_size": 32}),
    "NVFP4": Format(
        nvfp4(),
        {"AVX2MXFP4_MOE": KT_KERNEL},
        {"bits": 4, "group_size": 16},
        theirs=WeightFormat(E2M1, Scale("bf16", (1, 16))),
    ),
    "GPTQ_INT4": Format(
        int4(128, "fp16", GPTQ),
        {
            "AVXVNNI256GPTQInt4Packed_MOE": Roundings(sums=True, int8_group=128),
            "AVXVNNI256GPTQInt4_MOE": Roundings(sums=True, int8_group=128),
            "AVX2GPTQInt4_MOE": KT_KERNEL,
        },
        {"bits": 4, "group_size": 128},
        256,
    ),
    "AMXINT8": Format(
        B16, {"AMXInt8_MOE": Roundings(sums=True, int8_group=ROW)}, intermediate=256, rounds=Quantizer("int8", rule="amxint8")
    ),
    "AMXINT4": Format(
        B16, {"AMXInt4_MOE": Roundings(sums=True, int8_group=ROW)}, intermediate=256, rounds=Quantizer("int4", rule="amxint4")
    ),
}
#: Classes that load the expert of its own number into a slot, and leave those out that the map leaves out.
IGNORES_MAP = {"AVX2FP8_MOE", "AVX2MXFP8_MOE", *FORMATS["GPTQ_INT4"].kinds, "AMXInt8_MOE", "AMXInt4_MOE"}
#: (method, class): a class may serve two methods.
KINDS = [(name, kind) for name, format in FORMATS.items() for kind in format.kinds]


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
#: The experts on kt-kernel's GPU: they are skipped here.
ON_GPU = np.arange(EXPERTS) == 2
#: Slot i has the checkpoint's expert of that number; one is there twice.
MOVED = np.array([3, 0, 0, 7, 1, 2, 6, 5])
#: The slots' experts for classes that round while they load: kt-kernel 0.7.2's have a wrong result now and then where two slots
#: have one expert.
ALL_MOVED = np.array([3, 0, 4, 7, 1, 2, 6, 5])


#: What is compared of each method: classes are compared in all of these.
CASES = [
    ("MXFP4", "silu"),
    ("MXFP4", "limit"),
    ("MXFP4", "alpha"),
    ("MXFP8", "alpha"),
    *((name, "silu") for name in FORMATS if name != "MXFP4"),
]


@functools.cache
def originals(name: str, clamps: str = "silu") -> ExpertWeights:
    """What a checkpoint holds."""
    wide = {} if clamps == "silu" else {"scales": WIDE}
    rng, form = np.random.default_rng(len(name + clamps)), FORMATS[name]
    activation = CLAMPS[clamps].activation
    return random_experts(rng, EXPERTS, HIDDEN, form.intermediate, formats=form.weights, activation=activation, **wide)


@functools.cache
def experts(name: str, clamps: str = "silu") -> ExpertWeights:
    """What ktmoe computes with."""
    rounds = FORMATS[name].rounds
    return rounds.experts(originals(name, clamps)) if rounds else originals(name, clamps)


@functools.cache
def loaded(name: str, clamps: str = "silu") -> ExpertWeights:
    """What kt-kernel computes with: the same, unless its loader rounds it."""
    return as_theirs(experts(name, clamps), FORMATS[name].theirs)


def as_theirs(weights: ExpertWeights, form: WeightFormat | None) -> ExpertWeights:
    """The weights with one scale for both levels of NVFP4, rounded to float32 and then to bfloat16."""
    if form is None:
        return weights

    def read(expert, projection):
        matrix = weights.matrix(expert, projection)
        scales = matrix.format.scale.numbers(matrix.scales).astype(np.float32) * matrix.factor[0]
        return Matrix(matrix.name, form, matrix.shape, matrix.codes, scales.astype(BF16))

    sizes = weights.num_experts, weights.hidden, weights.intermediate
    return ExpertWeights(*sizes, read, form, weights.activation, weights.name)


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
    """kt-kernel's result for batch() by the model, and how far ktmoe's own y, float64, can be from what kt-kernel returns."""
    roundings = replace(roundings, clamps_below=CLAMPS[clamps].below)
    weights, arguments = loaded(name, clamps), (*batch(), roundings)
    return rounding.forward(weights, *arguments, skip=ON_GPU), rounding.apart(
        experts(name, clamps), weights, *arguments, skip=ON_GPU
    )


@functools.cache
def own(name: str, clamps: str, activations: str = "bf16", rounding: str = "exact") -> reference.Reference:
    """The reference of ktmoe's own result for batch(), in one of its modes."""
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
