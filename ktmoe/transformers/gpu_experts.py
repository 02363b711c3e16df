"""Experts of a layer that are on a GPU: which they are, their weights as torch tensors, and the sum with the CPU's part."""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ktmoe.arrays import as_numpy, is_torch
from ktmoe.errors import InputError
from ktmoe.messages import show
from ktmoe.transformers.modules import layer_of


def read(gpu_experts: Any) -> int | np.ndarray:
    """A number, or an array of what ktmoe.transformers.load() is given. Raises InputError for rows of several lengths, and for
    a tensor that cannot be an array.
    """
    if gpu_experts is None or (isinstance(gpu_experts, (int, np.integer)) and not isinstance(gpu_experts, bool)):
        return operator.index(gpu_experts or 0)
    if is_torch(gpu_experts):
        return as_numpy(gpu_experts if gpu_experts.is_meta else gpu_experts.cpu(), "gpu_experts")
    try:
        return np.asarray(gpu_experts)
    except ValueError:
        raise InputError(f"gpu_experts: expected rows of one length, found {show(gpu_experts)}") from None


def choose(gpu_experts: object, model: torch.nn.Module, counts: Mapping[str, int]) -> list[np.ndarray]:
    """The ids of the experts on the GPU, ascending, for each of a model's modules of experts.

    gpu_experts: as ktmoe.transformers.load() has it. counts: {a module's name: its experts}. Raises InputError.
    """
    least, count, modules = min(counts.values()), max(counts.values()), len(counts)
    mask = read(gpu_experts)
    if isinstance(mask, int):
        if not 0 <= mask <= least:
            raise InputError(f"gpu_experts: expected 0 to {least} experts of each layer, found {mask}")
        return [np.arange(mask) for _ in counts]
    layers: Any = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)  # also those without experts
    if mask.dtype == np.bool_ and least == count:
        if mask.shape in ((count,), (modules, count)):
            return [np.flatnonzero(row) for row in np.broadcast_to(mask, (modules, count))]
        numbers = [layer_of(name) for name in counts]
        known = [number for number in numbers if number is not None]
        if mask.shape == (layers, count) and len(known) == modules and max(known) < layers:
            return [np.flatnonzero(mask[number]) for number in known]
    rows = f"{modules} layers" if layers in (None, modules) else f"{modules} layers with experts or all {layers} layers"
    expected = f"a number, or bool [{count} experts] or [{rows}, {count} experts]"
    raise InputError(f"gpu_experts: expected {expected}, found {mask.dtype} {list(mask.shape)}")


@dataclass(frozen=True)
class Chosen:
    """What the tokens of one call chose of the experts on a GPU: pairs of a token and its expert, sorted by expert.

    tokens, places: on the GPU, of each pair, its token and its place in the flat ids. counts: {slot: its pairs}, ascending.
    rounds: on the GPU, pairs of which no two are of one token; in all of them together, each pair is once, and those of a token
    are in the order of its ids. others: on the CPU, the ids of the experts there, and -1 in the places of the pairs.
    """

    tokens: torch.Tensor
    places: torch.Tensor
    counts: dict[int, int]
    rounds: tuple[torch.Tensor, ...]
    others: torch.Tensor


class GpuExperts(torch.nn.Module):
    """Some experts of a module, as torch tensors, which torch computes where they are.

    module: the packed one, whose parameters are gone. tensors: what these experts' parameters were, on that device. chosen:
    which experts they are, ascending.
    """

    def __init__(self, module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], chosen: np.ndarray):
        super().__init__()
        self.chosen = chosen
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)
        self._slots = np.full(module.ktmoe_layer.num_experts + 1, -1)  # the last is for ids that are no expert's
        self._slots[chosen] = np.arange(len(chosen))
        # transformers' own module, whose weights are these, for its function between the matrices
        own = copy.copy(module)
        own.__class__ = type(module).__base__  # in which parameters may be asked for
        own._modules = {name: module for name, module in own._modules.items() if name != "gpu_experts"}
        own._buffers = self._buffers
        self._own = (own,)  # no submodule: whoever looks for modules of experts finds the whole one

    @property
    def device(self) -> torch.device:
        return next(self.buffers()).device

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self._buffers)

    def choose(self, ids: torch.Tensor) -> Chosen | None:
        """ids: [tokens, top_k], on the CPU. None if no token chose one of these experts."""
        array, last = ids.numpy(), len(self._slots) - 1
        slots = self._slots[np.where((array >= 0) & (array < last), array, last)]
        here = slots >= 0
        places = np.flatnonzero(here)
        if not places.size:
            return None
        order = np.argsort(slots.ravel()[places], kind="stable")
        earlier = (np.cumsum(here, axis=1) - 1).ravel()[places][order]  # pairs of the same token that are to be added before
        places = places[order]
        uses = np.bincount(slots.ravel()[places])
        used = np.flatnonzero(uses)
        rounds = [np.flatnonzero(earlier == number) for number in range(earlier.max() + 1)]
        indices = [places // ids.shape[1], places, *rounds]
        # one copy, since each takes a while, however small it is
        tokens, places, *rounds = (
            torch.from_numpy(np.concatenate(indices)).to(self.device).split([len(each) for each in indices])
        )
        counts = dict(zip(used.tolist(), uses[used].tolist(), strict=True))
        return Chosen(tokens, places, counts, tuple(rounds), torch.from_numpy(np.where(here, -1, array)))

    def compute(self, hidden_states: torch.Tensor, top_k_weights: torch.Tensor, chosen: Chosen) -> torch.Tensor:
        """Each pair's output times its router weight, float32 [pairs, hidden], on the device of these experts.

        Each expert is a plain product, which every device and dtype has; grouped_mm() needs compute capability 8.0.
        """
        (module,) = self._own
        x = hidden_states.to(self.device)[chosen.tokens].to(module.down_proj.dtype)
        gate_up = self._multiply(x, "gate_up_proj", chosen.counts)
        outputs = self._multiply(module._apply_gate(gate_up), "down_proj", chosen.counts)
        return outputs.float() * top_k_weights.to(self.device).flatten()[chosen.places].float()[:, None]

    def _multiply(self, x: torch.Tensor, name: str, counts: Mapping[int, int]) -> torch.Tensor:
        (module,), made = self._own, []
        for slot, rows in zip(counts, x.split(list(counts.values())), strict=True):
            weight = getattr(module, name)[slot]
            product = rows @ (weight if module.is_transposed else weight.T)
            made.append(product + getattr(module, f"{name}_bias")[slot] if module.has_bias else product)
        return torch.cat(made)


def added(on_cpu: torch.Tensor, outputs: torch.Tensor, chosen: Chosen) -> torch.Tensor:
    """The CPU's part, float32 [tokens, hidden], to which each token's pairs are added in the order of its ids.

    The order is the same each time: index_add_() of a token that is there twice would add on a GPU as its threads come.
    """
    y = on_cpu.to(outputs.device)
    for rows in chosen.rounds:
        y.index_add_(0, chosen.tokens[rows], outputs[rows])
    return y
