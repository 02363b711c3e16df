"""The shapes of models.toml, and random experts of them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path

from ktmoe import measuring, synthetic
from ktmoe.experts import ExpertWeights
from ktmoe.weights.ggml import GGML

FILE = Path(__file__).with_name("models.toml")
_MAKERS = {
    "MXFP4": synthetic.deepseek_v4_experts,
    "MXFP4, biases": synthetic.gpt_oss_experts,
    "INT4": synthetic.kimi_k2_experts,
    "BF16": synthetic.qwen3_experts,
    **{name: published.experts for name, published in synthetic.PUBLISHED.items()},
    **{f"GGUF {name}": partial(synthetic.gguf_experts, types=name) for name in GGML},
}


@dataclass(frozen=True)
class Model:
    """The routed experts of one model. weights: a key of _MAKERS. layers: those that have routed experts."""

    name: str
    weights: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    layers: int = 1

    def __post_init__(self):
        if self.weights not in _MAKERS:
            known = ", ".join(map(repr, _MAKERS))
            raise ValueError(f"{self.name}: weights {self.weights!r} are unknown; known are {known}")
        for name in ("hidden", "intermediate", "experts", "top_k", "layers"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{self.name}: {name}: expected a whole number of at least 1, found {value!r}")
        if self.top_k > self.experts:
            raise ValueError(f"{self.name}: top_k: expected at most the {self.experts} experts, found {self.top_k}")

    def make(self, experts: int) -> ExpertWeights:
        """Experts of one layer, with random weights, which are drawn when they are read."""
        return _MAKERS[self.weights](num_experts=experts, hidden=self.hidden, intermediate=self.intermediate)

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of an expert's codes and scales."""
        return self.make(1).nbytes

    @cached_property
    def slot_flops(self) -> int:
        """FLOPs of one token in one expert."""
        return measuring.slot_flops(self)

    @property
    def nbytes(self) -> int:
        """All experts of all layers."""
        return self.layers * self.experts * self.expert_bytes


@cache
def models(path: Path = FILE) -> dict[str, Model]:
    """The models by name, in the file's order. Raises ValueError, which names the model, for fields that are wrong."""
    found = {}
    for name, fields in tomllib.loads(path.read_text()).items():
        try:
            found[name] = Model(name, **fields)
        except TypeError as error:  # a field that is missing or unknown, which the text names
            raise ValueError(f"{path.name} [{name}]: {error}") from None
    return found
