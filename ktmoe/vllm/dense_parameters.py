"""vLLM's parameters of a dense layer, made from what a WeightFormat says of its arrays. vLLM's loaders fill them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import torch
from vllm.model_executor.parameter import (
    BasevLLMParameter,
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    ModelWeightParameter,
    PackedColumnParameter,
    PackedvLLMParameter,
    PerTensorScaleParameter,
)

from ktmoe.vllm.parameters import Parameters
from ktmoe.weights.formats import WeightFormat

_CODES = {"BF16": torch.bfloat16, "E4M3": torch.float8_e4m3fn, "INT8": torch.int8}
_DTYPES = {"uint8": torch.uint8, "int32": torch.int32}


def create(
    layer: torch.nn.Module,
    parameters: Parameters,
    k: int,
    rows: Sequence[int],
    loader: Callable,
    scale_dtype: torch.dtype = torch.float32,
) -> dict[str, torch.nn.Parameter]:
    """Give a layer the parameters of a matrix [sum(rows), k], and return them by name. They are zeros: random weights that vLLM
    measures with are no codes of 8 bits.

    rows: of the matrices that are merged, one below the other. scale_dtype: of scales that are no bytes; float32 has every
    number of a checkpoint's.
    """
    form, n = parameters.format, sum(rows)
    made = {}
    for label, name in parameters.endings.items():
        dtype, shape = form.arrays(n, k)[label]
        if label == "factor":
            made[name] = _factor(form, len(rows), n, loader)
            continue
        axis = int(form.order.transposed)  # the outputs'
        if label in parameters.words:
            dtype, shape = np.dtype(np.int32), _in_words(label, shape, dtype)
        found = _zeros(shape, _dtype(form, label, dtype, scale_dtype))
        places = {"input_dim": 1 - axis, "output_dim": axis, "weight_loader": loader}
        if label == "scales" and form.scale.extent[0] > 1:
            made[name] = BlockQuantScaleParameter(data=found, **places)
        elif shape[axis] != n:
            made[name] = PackedvLLMParameter(data=found, packed_dim=axis, packed_factor=Fraction(n, shape[axis]), **places)
        else:
            made[name] = ModelWeightParameter(data=found, **places)
    for name, what in parameters.unread.items():
        made[name] = _unread(what, len(rows), made, loader)
    for name, parameter in made.items():
        layer.register_parameter(name, parameter)
    return made


def _zeros(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """numpy takes zeros from the system, which writes no page before it is used; torch writes them."""
    return torch.from_numpy(np.zeros((shape[0], shape[1] * dtype.itemsize), np.uint8)).view(dtype)


def _factor(form: WeightFormat, matrices: int, n: int, loader: Callable) -> torch.nn.Parameter:
    if not form.factor.per_row:
        return PerTensorScaleParameter(data=torch.zeros(matrices, dtype=torch.float32), weight_loader=loader)
    axis = int(form.order.transposed)
    data = torch.zeros((1, n) if axis else (n, 1), dtype=torch.float32)
    return ChannelQuantScaleParameter(data=data, output_dim=axis, weight_loader=loader)


def _in_words(label: str, shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, ...]:
    """Bytes of codes along k are four a word; zero points of 4 bits, eight a word along n."""
    return (shape[0], shape[1] * dtype.itemsize // 4) if label == "codes" else (-(-shape[0] // 8), shape[1])


def _dtype(form: WeightFormat, label: str, dtype: np.dtype, scale_dtype: torch.dtype) -> torch.dtype:
    """What the checkpoint has, where torch's copies are to keep every bit."""
    if label == "codes":
        return _CODES.get(form.element.name, _DTYPES.get(dtype.name))
    if label == "scales" and form.scale.kind == "e4m3":
        return torch.float8_e4m3fn
    return _DTYPES.get(dtype.name, scale_dtype)


def _unread(what: str, matrices: int, made: dict[str, torch.nn.Parameter], loader: Callable) -> torch.nn.Parameter:
    if what == "points":
        groups, n = made["scales"].shape
        data = torch.zeros(groups, n // 8, dtype=torch.int32)
        places = {"output_dim": 1, "packed_dim": 1, "packed_factor": 8, "weight_loader": loader}
        if isinstance(made["scales"], ChannelQuantScaleParameter):  # those of whole rows, which every process has
            return PackedColumnParameter(data=data, **places)
        return PackedvLLMParameter(data=data, input_dim=0, **places)
    if what == "shape":
        return BasevLLMParameter(data=torch.zeros(2, dtype=torch.int64), weight_loader=loader)
    return PerTensorScaleParameter(data=torch.zeros(matrices, dtype=torch.float32), weight_loader=loader)
