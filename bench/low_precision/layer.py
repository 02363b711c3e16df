"""Errors of one layer of experts in every activation mode, beside exact bf16, on random data of three kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from bench.models import models
from ktmoe import MoELayer
from ktmoe.experts import ExpertWeights

MODEL = "V4-Flash"
EXPERTS, TOKENS = 8, 256
#: Each mode beside exact bf16: integers, MX formats on both sides, on one side, and by other rules.
MODES = (
    *("int16", "int8", "mxfp8", "mxfp8/mxfp4", "mxfp4"),
    *("mxfp8/bf16", "bf16/mxfp8", "mxfp4/bf16", "bf16/mxfp4"),
    *("mxfp8:round", "mxfp8:floor", "mxfp8:even"),
    *("mxfp4:round", "mxfp4:floor", "mxfp4:even", "mxfp4:modelopt"),
)


def _outliers(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """x as in large language models: a few channels, the same of every token, are much larger than the others."""
    x = random.standard_normal(shape)
    x[:, random.choice(shape[1], shape[1] // 128, replace=False)] *= 20
    return x


#: What x is, before each token is scaled to a root mean square of 1, as the norm before the experts does.
DATA: dict[str, Callable[[np.random.Generator, tuple[int, int]], np.ndarray]] = {
    "Gaussian": lambda random, shape: random.standard_normal(shape),
    "heavy tails": lambda random, shape: random.standard_t(3, shape),
    "outlier channels": _outliers,
}


@dataclass(frozen=True)
class Error:
    """The error of a mode's y beside y of bf16, over all tokens. relative: ||y - y_bf16|| / ||y_bf16||. cosine: of the two."""

    activations: str
    data: str
    relative: float
    cosine: float

    @classmethod
    def of(cls, activations: str, data: str, y: np.ndarray, exact: np.ndarray) -> Error:
        y, exact = y.astype(np.float64).ravel(), exact.astype(np.float64).ravel()
        relative = float(np.linalg.norm(y - exact) / np.linalg.norm(exact))
        return cls(activations, data, relative, float(y @ exact / np.linalg.norm(y) / np.linalg.norm(exact)))


def inputs(data: str, hidden: int) -> np.ndarray:
    """float32 [TOKENS, hidden] that bfloat16 has exactly. float32, so that y is not rounded to bfloat16."""
    x = DATA[data](np.random.default_rng(0), (TOKENS, hidden))
    x /= np.sqrt(np.mean(np.square(x), axis=1, keepdims=True))
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def errors(modes: tuple[str, ...] = MODES, experts: ExpertWeights | None = None) -> Iterator[Error]:
    """The errors of each mode, by the backend that "auto" chooses for it, and of each kind of data."""
    experts = models()[MODEL].make(EXPERTS) if experts is None else experts
    random, top_k = np.random.default_rng(1), min(models()[MODEL].top_k, experts.num_experts)
    ids = np.argsort(random.random((TOKENS, experts.num_experts)), axis=1)[:, :top_k]
    weights = random.random((TOKENS, top_k), np.float32)
    weights /= weights.sum(axis=1, keepdims=True)
    x = {data: inputs(data, experts.hidden) for data in DATA}

    def outputs(mode: str) -> dict[str, np.ndarray]:
        with MoELayer(experts, activations=mode) as layer:
            return {data: layer.forward(x[data], ids, weights) for data in DATA}

    exact = outputs("bf16")
    for mode in modes:
        for data, y in outputs(mode).items():
            yield Error.of(mode, data, y, exact[data])
