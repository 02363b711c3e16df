"""place(): which experts of a packed model are on its GPU, changed at run time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ktmoe.backends.base import Packed
from ktmoe.dequantization import dequantize, in_rows
from ktmoe.distributed.layer import DistributedLayer
from ktmoe.errors import ClosedError, UnavailableError
from ktmoe.experts import PROJECTIONS
from ktmoe.layer import MoELayer
from ktmoe.torch.experts import MoEExperts
from ktmoe.transformers.gpu_experts import GpuExperts, choose
from ktmoe.transformers.modules import is_experts, rows_of

#: Numbers of a matrix that are float64 at a time: the system takes longer to give memory for all of them than they take.
_AT_ONCE = 2**22


def place(model: torch.nn.Module, gpu_experts: np.ndarray | Sequence[Any] | int | None) -> None:
    """Put these experts of a model on its GPU, and all others on the CPU, without loading the model again.

    model: of load(), Config or pack(). gpu_experts: as load() has it; None or 0: no expert. The weights of those that come to
    the GPU are made of the packed ones, which all stay where they are, in the model's dtype, on the device of their layer.
    Layers change one after the other. A call of a layer computes each expert once, as it was placed when the call began, so
    other threads may use the model meanwhile.

    Raises, before anything is changed, InputError, and UnavailableError for experts that are not packed, that have adapters of
    ktmoe.torch.add_lora(), whose backend cannot give weights back, or whose layer is offloaded; ClosedError. Where memory does
    not suffice, layers before that one are changed, and the others are as they were.

    Examples:
        >>> model = ktmoe.transformers.load("Qwen3-30B-A3B")
        >>> ktmoe.transformers.place(model, None)  # all experts on the CPU
    """
    modules = {name: module for name, module in model.named_modules() if is_experts(module) or isinstance(module, MoEExperts)}
    if not modules or not hasattr(model, "config"):
        found = "a part of one" if modules else "none"
        raise UnavailableError(f"{type(model).__name__}: expected a model of transformers with packed experts, found {found}")
    for name, module in modules.items():
        if isinstance(module, MoEExperts):
            raise UnavailableError(f"{name}: expected experts without adapters, found those of ktmoe.torch.add_lora()")
        if isinstance(getattr(module, "ktmoe_layer", None), DistributedLayer):
            raise UnavailableError(f"{name}: expected experts of one process, found distributed ones")
        if getattr(module, "ktmoe_layer", None) is None:
            raise UnavailableError(
                f"{name} ({type(module).__name__}): expected packed experts, found others; ktmoe.transformers.pack() packs them"
            )
    put(model, modules, choose(gpu_experts, model, {name: module.ktmoe_layer.num_experts for name, module in modules.items()}))


@torch.inference_mode(False)
def put(model: torch.nn.Module, modules: Mapping[str, torch.nn.Module], chosen: Iterable[np.ndarray]) -> None:
    """Put the experts that choose() gave on the GPU, and all others on the CPU. modules: packed ones, by their names."""
    changes = []
    for (name, module), ids in zip(modules.items(), chosen, strict=True):
        before = module.gpu_experts
        if not np.array_equal(ids, [] if before is None else before.chosen):
            changes.append((module, ids, _device(model, name, module.ktmoe_layer) if ids.size else None))
    for module, ids, device in changes:
        module.gpu_experts = GpuExperts(module, _tensors(module, ids, model.dtype, device), ids) if ids.size else None


def _device(model: torch.nn.Module, name: str, layer: MoELayer) -> torch.device:
    """The device of the other parameters of the experts' block, such as the router's. Raises what place() does."""
    packed = layer.packed  # once: close() may come from another thread
    if packed is None:
        raise ClosedError(f"{name}: its layer was closed")
    if type(packed).export is Packed.export:  # the default, which refuses
        raise UnavailableError(
            f"{name}: backend {layer.backend!r} cannot give weights back, so its experts are on the CPU alone"
        )
    block = model.get_submodule(name.rpartition(".")[0])
    device = next((parameter.device for parameter in block.parameters()), model.device)
    if device.type == "meta":
        raise UnavailableError(f"{name}: expected the rest of its block in memory, found the device meta, as after offloading")
    return device


def _tensors(module: torch.nn.Module, ids: np.ndarray, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Some experts as what their module's parameters were. Those that are on the GPU already are copied there."""
    made = {name: torch.empty(len(ids), *shape, dtype=dtype, device=device) for name, shape in _shapes(module).items()}
    before = module.gpu_experts
    there = {} if before is None else {expert: slot for slot, expert in enumerate(before.chosen.tolist())}
    for slot, expert in enumerate(ids.tolist()):
        if expert in there:
            own = {name: tensor[there[expert]] for name, tensor in before.tensors.items()}
        else:
            own = _dequantized(module, expert, dtype)
        for name, tensor in own.items():
            made[name][slot] = tensor
    return made


def _dequantized(module: torch.nn.Module, expert: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """One expert as its part of what were the module's parameters, rounded to dtype, on the CPU."""
    made = {name: torch.empty(shape, dtype=dtype, device="cpu") for name, shape in _shapes(module).items()}
    (matrices,) = module.ktmoe_layer.export_expert(expert)
    for projection in PROJECTIONS:
        stem, matrix = "down_proj" if projection == "down" else "gate_up_proj", in_rows(matrices[projection])
        weight = made[stem].T if module.is_transposed else made[stem]
        own, step = rows_of(module, weight, projection), max(1, _AT_ONCE // weight.shape[1])
        for first in range(0, len(own), step):
            rows = slice(first, first + step)
            own[rows].copy_(torch.from_numpy(dequantize(matrix, rows)))
        if matrix.bias is not None:
            rows_of(module, made[f"{stem}_bias"], projection).copy_(torch.from_numpy(matrix.bias))
    return made


def _shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of one expert's part of what were the module's parameters."""
    layer = module.ktmoe_layer
    gate_up, down = (2 * layer.intermediate, layer.hidden), (layer.hidden, layer.intermediate)
    order = slice(None, None, -1 if module.is_transposed else 1)
    shapes = {"gate_up_proj": gate_up[order], "down_proj": down[order]}
    return shapes | ({"gate_up_proj_bias": gate_up[:1], "down_proj_bias": down[:1]} if module.has_bias else {})
