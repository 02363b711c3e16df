"""The error that an activation mode adds in each layer, on what enters the layer's experts in the exact run.

Errors do not add up along the layers here: every layer gets the exact run's inputs, expert ids and router weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ktmoe import reference
from ktmoe.errors import CheckpointError
from ktmoe.experts import ExpertWeights
from ktmoe.layer import MoELayer
from ktmoe.matrix import Matrix
from ktmoe.reference.difference import Difference
from ktmoe.weights.activation import GatedActivation

#: Tokens of each layer whose outputs are compared. Tokens that are also compared with the float64 reference, which takes about
#: a second for each of them in a layer of DeepSeek-V4-Flash.
SAMPLED, CHECKED = 64, 2
#: Outputs of such a token.
COLUMNS = 64


@dataclass(frozen=True)
class Sample:
    """x: bfloat16 or float32 [tokens, hidden]; ids: integers [tokens, top_k]; weights: float32 [tokens, top_k]."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    def outputs(self, layer: MoELayer) -> np.ndarray:
        """The layer's outputs, not rounded to bfloat16: float32 [tokens, hidden]."""
        return layer.forward(self.x.float(), self.ids, self.weights).numpy()


class LayerErrors:
    """One layer's errors, on a sample of what enters it in the exact run.

    name: its module's. layer: of the exact run; it is not kept. activation: between gate/up and down.
    formats: its weights', in words. relative: ||y_exact - y|| / ||y|| of the exact run beside the float64 reference, for
    `checked` tokens. of_bound: the largest share that one of these outputs' errors is of its bound; above 1 is wrong.
    """

    def __init__(self, name: str, layer: MoELayer, activation: GatedActivation, sample: Sample):
        self.name = name
        self.sample = sample
        self.formats = formats_of(layer)
        self.num_experts, self.hidden, self.intermediate = layer.num_experts, layer.hidden, layer.intermediate
        self._exact = sample.outputs(layer)
        columns = np.unique(np.linspace(0, layer.hidden - 1, COLUMNS).astype(int))
        y = self._exact[:CHECKED, columns]
        self.checked = len(y)
        expected = reference.forward(
            weights_of(layer, activation),
            sample.x[:CHECKED].float().numpy(),
            sample.ids[:CHECKED].numpy(),
            sample.weights[:CHECKED].numpy(),
            router_weight=layer.router_weight,
            out_dtype="float32",
            columns=columns,
            activations=layer.activations,
            rounding=layer.rounding,
            tuned_for=layer.tuned_for,
        )
        self.relative, self.of_bound = Difference.of(y, expected.y).relative, expected.worst(y)

    def difference(self, layer: MoELayer) -> Difference:
        """The difference that another mode makes to the same layer, or other weights of the same shape.

        Raises CheckpointError, which names the layer, if the shape is another.
        """
        for name in ("num_experts", "hidden", "intermediate"):
            found, expected = getattr(layer, name), getattr(self, name)
            if found != expected:
                raise CheckpointError(f"{self.name}: {name} is {found}, expected {expected}, as in the original")
        return Difference.of(self.sample.outputs(layer), self._exact)


class Sampler:
    """Takes SAMPLED tokens of what enters each layer's experts, about equally many from each window.

    modules: by name. windows: how many there will be. start() has to be called with a window's number before the model runs.
    """

    def __init__(self, modules: dict[str, torch.nn.Module], windows: int):
        self._windows = windows
        self._left: dict[str, int] = {}
        self._taken: dict[str, list[tuple[torch.Tensor, ...]]] = {name: [] for name in modules}
        self._random = np.random.default_rng(0)
        self._hooks = [
            module.register_forward_pre_hook(lambda _, arguments, name=name: self._take(name, *arguments))
            for name, module in modules.items()
        ]

    def start(self, window: int) -> None:
        wanted = (window + 1) * SAMPLED // self._windows - window * SAMPLED // self._windows
        self._left = dict.fromkeys(self._taken, wanted)

    def samples(self) -> dict[str, Sample]:
        """The samples of each module that was called; nothing is taken any more."""
        for hook in self._hooks:
            hook.remove()
        return {name: Sample(*map(torch.cat, zip(*taken, strict=True))) for name, taken in self._taken.items() if taken}

    def _take(self, name: str, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        count = min(self._left[name], len(x))
        if count:
            rows = torch.from_numpy(self._random.choice(len(x), count, replace=False))
            self._taken[name].append((x[rows].cpu(), ids[rows].cpu(), weights[rows].float().cpu()))
            self._left[name] -= count


def formats_of(layer: MoELayer) -> str:
    """The formats of a layer's weights, in words."""
    return ", ".join(dict.fromkeys(each.description for each in layer.spec.formats.values()))


def weights_of(layer: MoELayer, activation: GatedActivation) -> ExpertWeights:
    """What a layer was packed from: the checkpoint's own bytes, unpacked when they are read."""
    last: dict[int, dict[str, Matrix]] = {}

    def read(expert: int, projection: str) -> Matrix:
        if expert not in last:
            last.clear()
            last[expert] = layer.export_expert(expert)[0]
        return last[expert][projection]

    spec = layer.spec
    return ExpertWeights(
        spec.num_experts, spec.hidden, spec.intermediate, read, spec.formats, activation, spec.name, layer.router_weight
    )
