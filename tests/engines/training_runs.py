"""Small models whose experts have LoRA, trained for some steps: by ktmoe and by plain PyTorch from the same start."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from eager_experts import EagerExperts
from engine_models import VOCABULARY, experts
from serving import eager_float32
from torch import nn
from transformers import PreTrainedModel

import ktmoe
import ktmoe.torch
import ktmoe.transformers as served
from ktmoe.training import Lora

STEPS, RANK, ALPHA, LEARNING_RATE = 20, 4, 16, 0.1


@dataclass(frozen=True)
class Run:
    """losses: of each step. changes: by how much each trained tensor changed, by its name."""

    losses: list[float]
    changes: dict[str, torch.Tensor]

    def difference(self, other: Run) -> tuple[float, float]:
        """The largest of a loss, relative; and that of all changes together, relative to the other's norm."""
        assert self.changes.keys() == other.changes.keys()
        off, size = 0.0, 0.0
        for name, expected in other.changes.items():
            off += float((self.changes[name].double() - expected.double()).square().sum())
            size += float(expected.double().square().sum())
        losses = [abs(a - b) / b for a, b in zip(self.losses, other.losses, strict=True)]
        return max(losses), math.sqrt(off / size)


def started(spec: ktmoe.experts.ExpertSpec, layer: int) -> Lora:
    """An adapter whose B is not zero, so that all gradients count from the first step."""
    lora = Lora.initial(spec, RANK, ALPHA, seed=layer)
    rng = np.random.default_rng(layer)
    for a, b in lora.pairs.values():
        b[...] = rng.standard_normal(b.shape) * 0.1 * a.shape[2] ** -0.5
    return lora


def weights_of(folder: Path, name: str) -> tuple[int, ktmoe.ExpertWeights]:
    """(layer, weights) of a module of experts."""
    layer = int(re.search(r"layers\.(\d+)\.", name)[1])
    return layer, ktmoe.load_experts(folder, layer)


def loaded(folder: Path, dense: str = "packed") -> PreTrainedModel:
    """Packed experts, and the rest of the model in float32: what enters packed matrices is rounded to bfloat16.

    dense: load()'s. "torch" is for what is compared with a model that rounds nothing but what enters its experts.
    """
    model = served.load(folder, activations="bf16", dense=dense)
    return nn.Module.float(model)  # transformers has no such method for what was packed


def by_ktmoe(folder: Path, dense: str = "packed") -> PreTrainedModel:
    model = loaded(folder, dense)
    given = {layer: started(weights.spec, layer) for layer, weights in (weights_of(folder, n) for n, _ in experts(model))}
    ktmoe.torch.add_lora(model, given=given)
    return model.train()


def by_pytorch(folder: Path, experts_dtype: torch.dtype, rounded: bool, adapted: bool = True) -> PreTrainedModel:
    """The rest of the model in float32. experts_dtype, rounded: EagerExperts'. adapted: whether
    the experts have adapters."""
    model = eager_float32(folder).requires_grad_(False)
    for name, _ in list(experts(model)):
        layer, weights = weights_of(folder, name)
        lora = started(weights.spec, layer) if adapted else None
        module = EagerExperts(weights, lora, dtype=experts_dtype, rounded=rounded)
        model.set_submodule(name, module)
    return model.train()


def texts() -> torch.Tensor:
    """[2, batch, length] of ids."""
    return torch.randint(2, VOCABULARY, (2, 2, 24), generator=torch.Generator().manual_seed(11))


def train(model: PreTrainedModel, steps: int = STEPS) -> Run:
    """A plain loop. SGD with momentum, since AdamW's first steps are the signs of gradients, however small those are."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in parameters.items()}
    optimizer = torch.optim.SGD(parameters.values(), lr=LEARNING_RATE, momentum=0.9)
    losses = []
    with torch.enable_grad():
        for step in range(steps):
            ids = texts()[step % 2]
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return Run(losses, {name: p.detach() - before[name] for name, p in parameters.items()})
