"""DenseLinear: a dense matrix that stays packed, where a model has a torch.nn.Linear."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from ktmoe import arrays
from ktmoe.errors import InputError
from ktmoe.linear import Linear


class DenseLinear(torch.nn.Module):
    """y = x W^T + b of a ktmoe.Linear, frozen and packed. It is called as a torch.nn.Linear is.

    linear: a Linear, which a deep copy of the module shares. Gradients of x need activations="bf16"; without them, any mode
    will do. Do not replace its matrix between a forward pass and the backward pass.

    It has no parameters, and state_dict() is empty. Attributes: linear. in_features, out_features: k and n.

    Raises InputError for anything else.
    """

    def __init__(self, linear: Linear):
        super().__init__()
        if not isinstance(linear, Linear):
            found = type(linear)
            raise InputError(f"linear must be a ktmoe.Linear, found {found.__module__}.{found.__qualname__}")
        self.linear = linear
        self.out_features, self.in_features = linear.shape

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., out_features] of x's dtype. x: [..., in_features], bfloat16 or float32, on the CPU.

        Raises InputError; ClosedError; UnavailableError, which says why, if x requires grad and the Linear has no gradient.
        """
        if not isinstance(x, torch.Tensor):
            raise InputError(f"x must be a torch tensor, found {type(x).__name__}")
        arrays.view(x, "x")  # refuses other dtypes and devices before torch does anything with them
        if x.shape[-1:] != (self.in_features,):
            raise InputError(f"x must have shape [..., {self.in_features}], found {list(x.shape)}")
        if x.requires_grad and torch.is_grad_enabled():
            # of no rows: it raises now what it would raise in the backward pass
            self.linear.backward(np.empty((0, self.out_features), np.float32))
        return _Product.apply(self.linear, x)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.linear.format.description}"

    def __deepcopy__(self, memo: dict) -> DenseLinear:
        """As any module's, but for the Linear, which copies share."""
        memo[id(self.linear)] = self.linear
        memo[id(self)] = other = type(self).__new__(type(self))
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, linear, x):
        ctx.linear = linear
        return _rows_through(linear.forward, x, *linear.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):
        n, k = ctx.linear.shape
        return None, _rows_through(ctx.linear.backward, grad_y, k, n)


def _rows_through(product, given: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
    """[..., outputs] of given's dtype, of a product that takes [rows, inputs]."""
    # a tensor of its own: what a function returns must be no view of another one, or nobody may change it in place
    out = torch.empty(*given.shape[:-1], outputs, dtype=given.dtype)
    product(given.reshape(-1, inputs), out=out.view(-1, outputs))
    return out
