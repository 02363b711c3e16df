"""Models loaded eagerly, as an oracle, and by each way in which ktmoe can serve them; and the routing of one in another."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import engine_models
import torch
from checkpoints import numbers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import ktmoe
import ktmoe.transformers as served


def eager(folder: Path) -> PreTrainedModel:
    """transformers' own loop over experts, in bfloat16: it rounds to that what is packed."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, experts_implementation="eager").eval()


def eager_float32(folder: Path) -> PreTrainedModel:
    """The same with float32 in place of bfloat16, but for weights that are not experts'. Experts' are as they are packed."""
    model = nn.Module.float(eager(folder))  # transformers has no such method for what was packed
    for name, module in engine_models.experts(model):
        weights = ktmoe.load_experts(folder, int(re.search(r"layers\.(\d+)\.", name)[1]))
        for expert in range(weights.num_experts):
            gate, up, down = (torch.from_numpy(numbers(weights.matrix(expert, p))) for p in ("gate", "up", "down"))
            fused = torch.cat([gate, up]) if module.is_concatenated else torch.stack([gate, up], 1).flatten(0, 1)
            module.gate_up_proj.data[expert] = fused.T if module.is_transposed else fused
            module.down_proj.data[expert] = down.T if module.is_transposed else down
    return model


def packed(folder: Path, **options: object) -> PreTrainedModel:
    """Way (a): the parameters of a loaded model."""
    model = eager(folder)
    served.pack(model, **options)
    return model


def switched(folder: Path) -> PreTrainedModel:
    """Way (a), each layer when it is first called."""
    model = eager(folder)
    model.set_experts_implementation("ktmoe")
    return model


def _named(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, experts_implementation="ktmoe").eval()


def _loaded(source: str) -> Callable[[Path], PreTrainedModel]:
    return lambda folder: served.load(folder, source=source).eval()


def _configured(folder: Path, **options: object) -> PreTrainedModel:
    config = served.Config(**options)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config).eval()


#: The ways to serve a checkpoint in bfloat16.
WAYS = {
    "pack()": packed,
    "set_experts_implementation()": switched,
    "experts_implementation=": _named,
    "load(source='auto')": _loaded("auto"),
    "load(source='checkpoint')": _loaded("checkpoint"),
    "load(source='parameters')": _loaded("parameters"),
    "quantization_config=": lambda folder: _configured(folder, source="parameters"),
}
#: The ways that take options.
CHOOSING = {
    "pack()": packed,
    "load(source='checkpoint')": lambda folder, **options: served.load(folder, source="checkpoint", **options),
    "load(source='parameters')": lambda folder, **options: served.load(folder, source="parameters", **options),
    "quantization_config=": _configured,
}


def assert_served(model: PreTrainedModel) -> None:
    """Every module of experts has a layer of ktmoe and no parameter; nothing of the model is left without memory."""
    modules = dict(engine_models.experts(model))
    assert len(modules) == sum(hasattr(module, "ktmoe_layer") for module in model.modules()) > 0
    for module in modules.values():
        assert module.ktmoe_layer is not None
        assert list(module.parameters()) == []
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    assert [name for name in tensors if ".experts." in name] == []
    assert [name for name, tensor in tensors.items() if tensor.device.type != "cpu"] == []


Routing = dict[str, list[tuple[torch.Tensor, torch.Tensor]]]


@contextmanager
def recorded(model: nn.Module):
    """The ids and router weights that each module of experts is called with, call after call."""
    calls: Routing = {name: [] for name, _ in engine_models.experts(model)}

    def record(name):
        return lambda _module, arguments: calls[name].append((arguments[1].clone(), arguments[2].clone()))

    handles = [module.register_forward_pre_hook(record(name)) for name, module in engine_models.experts(model)]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replayed(model: nn.Module, calls: Routing):
    """Each module of experts is called once, with the ids and router weights of all those calls together."""

    def replace(name):
        ids, weights = (torch.cat(tensors) for tensors in zip(*calls[name], strict=True))
        return lambda _module, arguments: (arguments[0], ids, weights.to(arguments[2].dtype))

    handles = [module.register_forward_pre_hook(replace(name)) for name, module in engine_models.experts(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
