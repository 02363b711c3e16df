"""Adapters on the experts of a whole model, which ktmoe.transformers has packed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ktmoe.arrays import BF16
from ktmoe.errors import InputError, UnavailableError
from ktmoe.experts import PROJECTIONS
from ktmoe.messages import show
from ktmoe.torch.experts import MoEExperts
from ktmoe.training import Lora, Training

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_DTYPES = {torch.float32: "float32", torch.bfloat16: BF16}


def add_lora(
    model: torch.nn.Module,
    rank: int = 16,
    alpha: float = 32,
    projections: Iterable[str] = PROJECTIONS,
    *,
    given: Mapping[int | str, Lora] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    recompute: bool = False,
) -> list[torch.nn.Parameter]:
    """Put MoEExperts with adapters in the place of a model's packed experts, and return their parameters.

    model: of ktmoe.transformers.load() or pack() with activations="bf16", or one that peft has wrapped. peft freezes what it
    finds when it wraps a model: call get_peft_model() first. All else of the model is as it was.
    rank, alpha, projections, seed, dtype: of new adapters, as Lora.initial() has them; layer i has seed + i. given: {layer:
    Lora} in their place, by what loras() calls the layers; layers that it lacks get no adapter. recompute: as
    MoEExperts.

    Raises UnavailableError, before anything is changed, for a model without packed experts or whose experts cannot be trained,
    InputError.

    Examples:
        >>> model = ktmoe.transformers.load("Qwen3-30B-A3B", activations="bf16")
        >>> optimizer = torch.optim.AdamW(add_lora(model, rank=4, alpha=8), lr=1e-4)
    """
    if dtype not in _DTYPES:
        raise InputError(f"dtype must be torch.float32 or torch.bfloat16, found {show(dtype)}")
    packed = {name: module for name, module in model.named_modules() if getattr(module, "ktmoe_layer", None) is not None}
    if not packed:
        why = "it has adapters already" if loras(model) else "load it with ktmoe.transformers.load()"
        raise UnavailableError(f"{type(model).__name__}: expected a model with packed experts, found none; {why}")
    projections = projections if isinstance(projections, str) else tuple(projections)  # for each layer anew
    named = _named(packed)
    if unknown := [layer for layer in given or () if layer not in named.values()]:
        raise InputError(f"given: expected layers of {show(list(named.values()))}, found {show(unknown[0])}")
    made = {}
    for i, (name, module) in enumerate(packed.items()):
        if module.gpu_experts is not None:
            raise UnavailableError(f"{name}: expected all experts on the CPU, found some on a GPU, which cannot be trained")
        passes = Training(module.ktmoe_layer, recompute)
        if given is None:
            made[name] = MoEExperts(passes, Lora.initial(passes.spec, rank, alpha, projections, seed + i, _DTYPES[dtype]))
        elif named[name] in given:
            made[name] = MoEExperts(passes, given[named[name]])
    for name, module in made.items():
        module.train(model.training)
        _refuse_as_before(packed[name], module)
        model.set_submodule(name, module)
    return [parameter for module in made.values() for parameter in module.parameters()]


def _refuse_as_before(packed: torch.nn.Module, module: MoEExperts) -> None:
    """A model whose parameters pack() has freed refuses to be saved: a checkpoint would have no experts. An adapter can be."""
    for hook in packed._state_dict_pre_hooks.values():

        def refuse(_: Any, prefix: Any, keep_vars: Any, hook: Any = hook) -> None:
            if prefix:
                hook(packed, prefix, keep_vars)

        module.register_state_dict_pre_hook(refuse)


def loras(model: torch.nn.Module) -> dict[int | str, Lora]:
    """{layer: its adapter, which shares the parameters' memory}: by the layer's number, or by the module's name where that has
    no number of its own. Raises InputError for a number that is not finite.

    Examples:
        >>> model = ktmoe.transformers.load("Qwen3-30B-A3B", activations="bf16")
        >>> parameters = add_lora(model, rank=4, alpha=8, projections=["down"])
        >>> list(loras(model)), loras(model)[0].projections
        ([0, 1], ('down',))
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, MoEExperts) and module.projections}
    return {key: lora for name, key in _named(found).items() if (lora := found[name].lora) is not None}


def _named(modules: Iterable[str]) -> dict[str, int | str]:
    """{a module's name: its layer's number}, or its name, for all of them, if two have one number or one has none."""
    modules = list(modules)
    matches = [_LAYER.search(name) for name in modules]
    numbers = [int(match[1]) for match in matches if match]
    return dict(zip(modules, numbers if len(set(numbers)) == len(modules) else modules, strict=True))
