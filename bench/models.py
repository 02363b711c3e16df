"""The shapes of models.toml: experts of each, and how many of them make weights come from memory."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import machine

from ktmoe import synthetic
from ktmoe.experts import ExpertWeights

#: A footprint so many times the last-level cache is no longer found there when its turn comes again.
CACHE_TIMES = 4
#: At most so much of the available memory is packed at a time.
MEMORY_SHARE = 0.5
#: By default experts are left out of the models whose layer takes more than this (or CACHE_TIMES caches, if that is more).
DEFAULT_BYTES = 4 << 30

_FORMATS = {
    "MXFP4": synthetic.deepseek_v4_experts,
    "MXFP4, biases": synthetic.gpt_oss_experts,
    "INT4": synthetic.kimi_k2_experts,
    "BF16": synthetic.qwen3_experts,
}


@dataclass(frozen=True)
class Model:
    """The routed experts of one model, as models.toml has them."""

    name: str
    weights: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    layers: int

    def make(self, experts: int) -> ExpertWeights:
        """So many experts of one layer, with random weights."""
        return _FORMATS[self.weights](num_experts=experts, hidden=self.hidden, intermediate=self.intermediate)

    @property
    def expert_bytes(self) -> int:
        return self.make(1).nbytes


@dataclass(frozen=True)
class Footprint:
    """What is packed to measure a model: so many experts in each of so many layers, whose calls take turns."""

    experts: int
    layers: int


@cache
def models() -> dict[str, Model]:
    """By name, in the file's order."""
    with open(Path(__file__).with_name("models.toml"), "rb") as file:
        return {name: Model(name, **fields) for name, fields in tomllib.load(file).items()}


def footprint(model: Model, *, full: bool) -> Footprint:
    """The model's own number of experts where they fit, and as many layers as CACHE_TIMES caches take; fewer where memory ends.

    full: what fits is what memory allows; else it is DEFAULT_BYTES or CACHE_TIMES caches, whichever is more.
    """
    wanted = CACHE_TIMES * machine.last_cache_bytes()
    most = machine.usable_bytes(MEMORY_SHARE)
    if not full:
        most = min(most, max(wanted + model.expert_bytes, DEFAULT_BYTES))
    experts = max(model.top_k, min(model.experts, most // model.expert_bytes))
    layer_bytes = experts * model.expert_bytes
    layers = max(1, min(model.layers, math.ceil(wanted / layer_bytes), most // layer_bytes))
    return Footprint(int(experts), int(layers))
