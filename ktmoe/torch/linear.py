"""DenseLinear: a dense matrix that stays packed, where a model has a torch.nn.Linear."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from ktmoe import arrays
from ktmoe.errors import InputError
from ktmoe.linear import Linear
from ktmoe.torch.absent_weight import LinearWithoutWeight
from ktmoe.torch.operators import handle_of, held_operator
from ktmoe.torch.products import is_plain, products
from ktmoe.torch.shared_input import SharedInput


class DenseLinear(LinearWithoutWeight):
    """y = x W^T + b of a ktmoe.Linear, frozen and packed. It is called as a torch.nn.Linear is, and is one for isinstance().

    linear: a Linear, which a deep copy of the module shares. Gradients of x need activations="bf16"; without them, any mode
    will do. Do not replace its matrix between a forward pass and the backward pass.

    It has no parameters, and state_dict() is empty: weight is no tensor (AbsentWeight) and bias is None, whether there is a b
    or not. So nothing can be merged into it, and it cannot be resized. Attributes: linear. in_features, out_features: k and n.

    Raises InputError for anything else.

    Examples:
        >>> module = DenseLinear(linear)
        >>> y = module(torch.ones(1, linear.shape[1]))
        >>> y.dtype, y.shape == (1, linear.shape[0])
        (torch.float32, True)
    """

    def __init__(self, linear: Linear):
        if not isinstance(linear, Linear):
            found = type(linear)
            raise InputError(f"linear must be a ktmoe.Linear, found {found.__module__}.{found.__qualname__}")
        super().__init__(linear.name, linear.shape[1], linear.shape[0])
        self.linear = linear
        self._shared: SharedInput | None = None
        self._index = 0  # among those that share
        self._handle = handle_of(linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., out_features] of x's dtype and device.

        x: [..., in_features], bfloat16 or float32, or float16, which goes by way of float32. On another device than the CPU it
        is copied there, and y back.
        Raises InputError; ClosedError; UnavailableError, which says why, if x requires grad and the Linear has no gradient.
        """
        if torch.compiler.is_compiling():
            return on_cpu(self._traced, x, (self.in_features,), (self.out_features,))
        if is_plain(x) and x.shape[-1:] == self.linear.shape[1:]:
            if self._shared is not None:
                y = self._shared.take(self._index, x)
                if y is not None:
                    return y
            return products((self.linear,), x)[0]
        return on_cpu(self._product, x, (self.linear.shape[1],), (self.linear.shape[0],))

    def _traced(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            return outside_of_graphs(self, x)
        return _operator(x, self.out_features, self._handle)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            # of no rows: it raises now what it would raise in the backward pass
            self.linear.backward(np.empty((0, self.linear.shape[0]), np.float32))
        return Product.apply(self.linear, x, self.linear.shape[1:], self.linear.shape[:1])

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.linear.format.description}"

    def __deepcopy__(self, memo: dict[int, Any]) -> DenseLinear:
        """As any module's, but for the Linear, which copies share, and what computes it together with others."""
        return copied(self, memo, self.linear, self._shared)


def share_input(modules: list[DenseLinear]) -> None:
    """Compute what a model calls one after another with the very same tensor, as q, k and v, by one dispatch of the threads.

    modules: DenseLinears that a LinearGroup can have. The first one that is called with a tensor computes all of them. The
    others give what was computed, if the same thread calls them with the same tensor, and nobody changed it. No bit of
    y changes, and hooks see each module's own call. Modules that are called without the others go back to one call each.
    Each is computed by itself for tensors that require grad, those of torch.inference_mode(), those that are not bfloat16 or
    float32 on the CPU, and within torch.compile.

    Raises InputError for others.

    Examples:
        >>> q, k = DenseLinear(linear), DenseLinear(ktmoe.Linear(matrix))
        >>> share_input([q, k])
        >>> x = torch.ones(1, linear.shape[1])
        >>> torch.equal(q(x), k(x))  # q(x) computes both
        True
    """
    for module in modules:
        if not isinstance(module, DenseLinear):
            raise InputError(f"modules must be DenseLinears, found {type(module).__name__}")
    shared = SharedInput([module.linear for module in modules])
    for index, module in enumerate(modules):
        module._shared, module._index = shared, index


def on_cpu(product: Any, x: torch.Tensor, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> torch.Tensor:
    """[..., *outputs] of x's dtype and device. product: of a tensor on the CPU, bfloat16 or float32. x: [..., *inputs].

    Raises InputError for what is no such tensor.
    """
    if not isinstance(x, torch.Tensor):
        raise InputError(f"x must be a torch tensor, found {type(x).__name__}")
    if x.shape[len(x.shape) - len(inputs) :] != inputs:
        raise InputError(f"x must have shape [..., {', '.join(map(str, inputs))}], found {list(x.shape)}")
    if x.dtype not in (torch.bfloat16, torch.float32, torch.float16):
        raise InputError(f"x must be a torch tensor of bfloat16, float32 or float16; found one of {x.dtype}")
    if x.is_meta:
        return x.new_empty((*x.shape[: x.dim() - len(inputs)], *outputs))
    given = x.cpu()
    given = given.float() if x.dtype == torch.float16 else given
    if not torch.compiler.is_compiling():
        arrays.view(given, "x")  # refuses other layouts before torch does anything with them
    return product(given).to(x)


def copied(module: torch.nn.Module, memo: dict[int, Any], *kept: Any) -> Any:
    """copy.deepcopy() of a module, but for what copies share."""
    memo.update({id(each): each for each in kept})
    kind: Any = type(module)
    memo[id(module)] = other = kind.__new__(kind)
    other.__dict__.update(copy.deepcopy(module.__dict__, memo))
    return other


_operator = held_operator(
    "linear",
    "Tensor x, SymInt outputs",
    lambda linear, x, outputs: products((linear,), x)[0],
    lambda x, outputs: x.new_empty((*x.shape[:-1], outputs)),
)


@torch.compiler.disable
def outside_of_graphs(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module.forward(x)


class Product(torch.autograd.Function):
    """Of a Linear or a LinearGroup of inputs="own"; inputs, outputs: the last sizes of x and of y."""

    @staticmethod
    def forward(ctx: Any, packed: Any, x: Any, inputs: Any, outputs: Any) -> Any:
        ctx.packed, ctx.inputs, ctx.outputs = packed, inputs, outputs
        return _rows_through(packed.forward, x, inputs, outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Any) -> Any:
        return None, _rows_through(ctx.packed.backward, grad_y, ctx.outputs, ctx.inputs), None, None


def _rows_through(product: Any, given: torch.Tensor, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> torch.Tensor:
    """[..., *outputs] of given's dtype, of a product that takes [rows, *inputs]."""
    # a tensor of its own: what a function returns must be no view of another one, or nobody may change it in place
    out = torch.empty(*given.shape[: given.dim() - len(inputs)], *outputs, dtype=given.dtype)
    product(given.reshape(-1, *inputs), out=out.view(-1, *outputs))
    return out
