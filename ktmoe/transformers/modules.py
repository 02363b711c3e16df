"""Modules of routed experts in a transformers model: which there are, which are refused, and their parameters as weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch

from ktmoe.errors import CheckpointError, UnavailableError
from ktmoe.experts import ExpertWeights
from ktmoe.matrix import Matrix
from ktmoe.transformers.activation import recognise
from ktmoe.weights.activation import GatedActivation
from ktmoe.weights.formats import BF16

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class Experts:
    """One module of routed experts that ktmoe can compute.

    name: in its model. module, kind: transformers' module, and its class before ktmoe changes it.
    num_experts, hidden, intermediate: as ExpertWeights has them. activation: between gate/up and down.
    parameters: the shapes of its weights and biases, by name.
    """

    name: str
    module: torch.nn.Module
    kind: type[torch.nn.Module]
    num_experts: int
    hidden: int
    intermediate: int
    parameters: Mapping[str, tuple[int, ...]]
    activation: GatedActivation

    @property
    def layer(self) -> int | None:
        """The number of its layer, by its name."""
        return layer_of(self.name)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in bfloat16."""
        return 2 * 3 * self.num_experts * self.hidden * self.intermediate

    @property
    def title(self) -> str:
        """What messages call the module."""
        return f"{self.name} ({self.kind.__name__})"

    def weights(self, tensors: Mapping[str, torch.Tensor]) -> ExpertWeights:
        """bfloat16 tensors of the parameters' names and shapes as ExpertWeights, which read them when a matrix is asked for.

        Raises UnavailableError for another dtype.
        """
        for name, tensor in tensors.items():
            _check_dtype(f"{self.title}: {name}", tensor.dtype)

        def read(expert: int, projection: str) -> Matrix:
            stem = "down_proj" if projection == "down" else "gate_up_proj"
            weight = tensors[stem][expert]
            codes = rows_of(self.module, weight.T if self.module.is_transposed else weight, projection).cpu().contiguous()
            bias = tensors.get(f"{stem}_bias")
            bias = None if bias is None else rows_of(self.module, bias[expert], projection).float().cpu().contiguous().numpy()
            shape = tuple(codes.shape)
            return Matrix(f"{self.name}.{expert}.{projection}", BF16, shape, bfloat16(codes), bias=bias)

        return ExpertWeights(self.num_experts, self.hidden, self.intermediate, read, BF16, self.activation, name=self.name)


def layer_of(name: str) -> int | None:
    """The number of a module's layer, by the module's name."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def rows_of(module: torch.nn.Module, tensor: torch.Tensor, projection: str) -> torch.Tensor:
    """A projection's rows of one expert's weight [n, k] or bias [n]; of gate and up together, its half."""
    if projection == "down":
        return tensor
    second = projection == "up"
    if module.is_concatenated:
        half = len(tensor) // 2
        return tensor[half:] if second else tensor[:half]
    return tensor[int(second) :: 2]


def find(model: torch.nn.Module) -> list[Experts]:
    """The modules of routed experts of a model, which may be on the device "meta".

    Raises UnavailableError, which has the class and the reason, if there are none, or if ktmoe does not compute one of them.
    """
    modules = [(name, module) for name, module in model.named_modules() if is_experts(module)]
    if not modules:
        named = sorted({type(module).__name__ for module in model.modules() if "Experts" in type(module).__name__})
        found = f"transformers opens its {', '.join(named)} to no other implementation" if named else "it has no routed experts"
        raise UnavailableError(f"{type(model).__name__}: ktmoe cannot serve it: {found}")
    return [examine(module, name) for name, module in modules]


def is_experts(module: torch.nn.Module) -> bool:
    """Whether transformers lets others compute this module: its class has the decorator use_experts_implementation."""
    return hasattr(module, "_apply_gate") and isinstance(getattr(module, "has_gate", None), bool)


def examine(module: torch.nn.Module, name: str) -> Experts:
    """A module of experts, which has that name in its model.

    Raises UnavailableError, which has the class and the reason, if ktmoe does not compute such experts.
    """
    title = f"{name} ({type(module).__name__})"
    if hasattr(module, "ktmoe_layer"):
        raise UnavailableError(f"{title}: expected experts that are not packed yet, found packed ones")
    if not module.has_gate:
        raise UnavailableError(f"{title}: expected experts with gate, up and down, found no gate")
    if module.has_post_expert_norm:
        raise UnavailableError(f"{title}: expected experts alone, found a norm behind each of them")
    if module._is_expert_parallel:
        raise UnavailableError(f"{title}: expected all experts in one process, found expert parallelism")
    shapes = {parameter: tuple(value.shape) for parameter, value in module.named_parameters(recurse=False)}
    biases = ["gate_up_proj_bias", "down_proj_bias"] if module.has_bias else []
    expected = ["gate_up_proj", "down_proj", *biases]
    if sorted(shapes) != sorted(expected):
        raise UnavailableError(f"{title}: expected the parameters {', '.join(expected)}, found {', '.join(shapes)}")
    num_experts, hidden, intermediate = shapes["down_proj"]
    if module.is_transposed:
        hidden, intermediate = intermediate, hidden
    fused = (hidden, 2 * intermediate) if module.is_transposed else (2 * intermediate, hidden)
    if shapes["gate_up_proj"] != (num_experts, *fused):
        raise UnavailableError(
            f"{title}: expected gate_up_proj {[num_experts, *fused]} beside down_proj {list(shapes['down_proj'])}, "
            f"found {list(shapes['gate_up_proj'])}"
        )
    return Experts(name, module, type(module), num_experts, hidden, intermediate, shapes, recognise(module, title))


def check_same(experts: Experts, weights: ExpertWeights) -> None:
    """Raise CheckpointError if a checkpoint's weights are not those of this module."""
    sizes = ("num_experts", "hidden", "intermediate", "activation")
    expected = {size: getattr(experts, size) for size in sizes}
    found = {size: getattr(weights, size) for size in sizes}
    wrong = [f"{size} {expected[size]}, found {found[size]}" for size in sizes if expected[size] != found[size]]
    if weights.router_weight != "down_output":
        wrong.append(f"router weights on the output, found {weights.router_weight}")
    if wrong:
        raise CheckpointError(f"{weights.name}: expected as in {experts.title}: {'; '.join(wrong)}")


def bfloat16(tensor: torch.Tensor) -> np.ndarray:
    """A contiguous bfloat16 tensor's memory as an array."""
    return tensor.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype != torch.bfloat16:
        how = "load with dtype=torch.bfloat16 to round them"
        raise UnavailableError(f"{name}: expected bfloat16, found {str(dtype).removeprefix('torch.')}; {how}")
