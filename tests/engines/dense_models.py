"""Models of transformers whose dense matrices are packed, from their own parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import ml_dtypes
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4GroupedLinear

from ktmoe import Linear, LinearGroup, Matrix
from ktmoe.torch import DenseGroupedLinear, DenseLinear, share_input
from ktmoe.weights.formats import BF16


def matrix(linear: torch.nn.Linear, name: str) -> Matrix:
    """What a module holds, whose numbers are bfloat16's."""
    codes = linear.weight.detach().bfloat16().contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    bias = None if linear.bias is None else linear.bias.detach().float().numpy()
    return Matrix(name, BF16, tuple(linear.weight.shape), bias=bias, codes=codes)


@contextmanager
def packed(model: torch.nn.Module) -> Iterator[None]:
    """Put packed modules in the places of all torch.nn.Linear, in a context; q, k and v share their input."""
    opened = []
    for name, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear:
            opened.append(Linear(matrix(module, name)))
            model.set_submodule(name, DenseLinear(opened[-1]))
        elif isinstance(module, DeepseekV4GroupedLinear):
            opened.append(LinearGroup.of_rows(matrix(module, name), module.n_groups))
            model.set_submodule(name, DenseGroupedLinear(opened[-1]))
    for module in model.modules():
        together = [getattr(module, f"{name}_proj", None) for name in "qkv"]
        if all(isinstance(each, DenseLinear) for each in together):
            share_input(together)
    try:
        yield
    finally:
        for each in opened:
            each.close()
