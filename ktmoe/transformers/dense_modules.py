"""Dense matrices of a transformers model: the modules that have them, and what takes their places once they are packed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from ktmoe.linear import Linear
from ktmoe.linear_group import LinearGroup
from ktmoe.torch.embedding import DenseEmbedding
from ktmoe.torch.grouped_linear import DenseGroupedLinear
from ktmoe.torch.joined_linear import JoinedLinear
from ktmoe.torch.linear import DenseLinear, share_input

#: A module of fewer outputs is tiny, or a gate of the whole layer: it stays torch's.
_FEWEST_OUTPUTS = 16
#: The last parts of routers' names. A router's picks decide more than its bytes.
_ROUTERS = {"gate", "router", "wg"}
#: Modules that most models call with the same input, by their names in one parent.
_SAME_INPUT = (
    (  # DeepSeek-V4's compressed sparse attention; the next one is its heavily compressed attention
        "q_a_proj",
        "kv_proj",
        "compressor.kv_proj",
        "compressor.gate_proj",
        "compressor.indexer.kv_proj",
        "compressor.indexer.gate_proj",
        "compressor.indexer.scorer.weights_proj",
    ),
    ("q_a_proj", "kv_proj", "compressor.kv_proj", "compressor.gate_proj"),
    ("q_b_proj", "compressor.indexer.q_b_proj"),
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("q_a_proj", "kv_proj"),
    ("in_proj_qkvz", "in_proj_ba"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
)


@dataclass(frozen=True)
class DenseModule:
    """A module that multiplies its input by one matrix.

    name: in its model. module: a torch.nn.Linear. groups: of inputs, each with rows of its own; 0 for a usual matrix.
    """

    name: str
    module: torch.nn.Linear
    groups: int

    @property
    def parameter(self) -> str:
        """The name of its matrix."""
        return f"{self.name}.weight"

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)."""
        return tuple(self.module.weight.shape)


def find_dense(model: torch.nn.Module) -> list[DenseModule]:
    """The modules of a model that can be packed; it may be on the device "meta". Subclasses that compute more are left out."""
    found = (dense_module(name, module) for name, module in model.named_modules())
    return [each for each in found if each is not None]


def dense_module(name: str, module: torch.nn.Module) -> DenseModule | None:
    """A module of that name; None if it is to stay as it is."""
    if not isinstance(module, torch.nn.Linear) or is_small(name, module.out_features):
        return None
    if type(module) is torch.nn.Linear:
        return DenseModule(name, module, 0)
    return DenseModule(name, module, module.n_groups) if type(module).__name__ == "DeepseekV4GroupedLinear" else None


def is_small(name: str, outputs: int) -> bool:
    """Whether a module of that name is a router, or has few outputs: it stays torch's."""
    return is_router(name) or outputs < _FEWEST_OUTPUTS


def is_router(name: str) -> bool:
    """Whether a module of that name is a router."""
    return name.rpartition(".")[2] in _ROUTERS


@contextmanager
def without(model: torch.nn.Module, modules: Mapping[str, torch.nn.Module]) -> Iterator[None]:
    """The model with nothing in the places of these modules, by their names."""
    take_away(model, modules)
    try:
        yield
    finally:
        for name, module in modules.items():
            model.set_submodule(name, module)


def take_away(model: torch.nn.Module, names: Iterable[str]) -> None:
    """Put modules without parameters in the places of these."""
    for name in names:
        empty = torch.nn.Identity()
        empty._is_hf_initialized = True
        model.set_submodule(name, empty)


def put_packed(
    model: torch.nn.Module, name: str, packed: Linear | LinearGroup | Sequence[Linear], order: np.ndarray | None = None
) -> None:
    """Put a packed matrix in the place of the module of that name. Of several, its rows are theirs. order: JoinedLinear's."""
    if isinstance(packed, LinearGroup):
        made = DenseGroupedLinear(packed)
    elif isinstance(packed, Linear):
        made = DenseLinear(packed)
    elif len(packed) == 1 and order is None:
        made = DenseLinear(packed[0])
    else:
        made = JoinedLinear(name, [DenseLinear(each) for each in packed], order)
    model.set_submodule(name, made.eval())


def share_inputs(model: torch.nn.Module) -> None:
    """Compute packed matrices that take the same input together: one dispatch of the threads for q, k and v."""
    packed = {name: [module] for name, module in model.named_modules() if type(module) is DenseLinear}
    packed |= {name: [*module.parts] for name, module in model.named_modules() if type(module) is JoinedLinear}
    shared: set[str] = set()
    for parent, _ in model.named_modules():
        for names in _SAME_INPUT:
            full = [f"{parent}.{name}".removeprefix(".") for name in names]
            if not packed.keys() >= set(full) or not shared.isdisjoint(full):
                continue
            modules = [module for name in full for module in packed[name]]
            if len({module.in_features for module in modules}) == 1:
                share_input(modules)
                shared.update(full)


def output_of_embedding(model: torch.nn.Module) -> tuple[str, str] | None:
    """The names of the output layer and of the input embedding, if both are plain and have one matrix."""
    try:
        output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    except NotImplementedError:  # a part of a model
        return None
    if type(output) is not torch.nn.Linear or type(embedding) is not torch.nn.Embedding:
        return None
    if output.weight is not embedding.weight:
        return None
    names = {id(module): name for name, module in model.named_modules()}
    return names[id(output)], names[id(embedding)]


def put_embedding(model: torch.nn.Module, name: str, linear: Linear) -> None:
    """Put rows of the packed output layer in the place of the embedding of that name."""
    model.set_submodule(name, DenseEmbedding(linear, model.get_submodule(name).weight.dtype))
    untie(model, name)


def untie(model: torch.nn.Module, name: str) -> None:
    """Tie nothing to the embedding of that name any more."""
    # there is no parameter left to tie, now or when tie_weights() asks each model within this one
    apart = {key: source for key, source in model.all_tied_weights_keys.items() if source != f"{name}.weight"}
    model.all_tied_weights_keys = apart
    for owner, module in model.named_modules():
        if isinstance(tied := getattr(module, "_tied_weights_keys", None), dict):
            source = f"{name}.weight".removeprefix(f"{owner}.")
            module._tied_weights_keys = {key: pattern for key, pattern in tied.items() if not re.match(pattern, source)}
