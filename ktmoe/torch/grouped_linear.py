"""DenseGroupedLinear: matrices with an x each that stay packed, where DeepSeek-V4 has its DeepseekV4GroupedLinear."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ktmoe.errors import InputError
from ktmoe.linear_group import LinearGroup
from ktmoe.messages import show
from ktmoe.torch.absent_weight import LinearWithoutWeight
from ktmoe.torch.linear import Product, copied, on_cpu, outside_of_graphs
from ktmoe.torch.operators import handle_of, held_operator
from ktmoe.torch.products import grouped_products, is_plain


class DenseGroupedLinear(LinearWithoutWeight):
    """y[..., g, :] = x[..., g, :] W_g^T + b_g of a ktmoe.LinearGroup of inputs="own", frozen and packed, as DenseLinear is.

    group: what LinearGroup.of_rows() makes of DeepSeek-V4's wo_a, which a deep copy of the module shares.

    Attributes: group. n_groups: of its Linears. in_features: k of each. out_features: n of all, as transformers'
    DeepseekV4GroupedLinear has them.

    Raises InputError for anything else.

    Examples:
        >>> module = DenseGroupedLinear(ktmoe.LinearGroup.of_rows(matrix, 2))
        >>> y = module(torch.ones(1, 2, matrix.shape[1]))
        >>> y.shape == (1, 2, matrix.shape[0] // 2)
        True
    """

    def __init__(self, group: LinearGroup):
        if not isinstance(group, LinearGroup) or group.inputs != "own":
            raise InputError(f'group must be a ktmoe.LinearGroup of inputs="own", found {show(group)}')
        n, k = group.linears[0].shape
        self.n_groups = len(group.linears)
        super().__init__(group.linears[0].name, k, self.n_groups * n)
        self.group = group
        self._handle = handle_of(group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n_groups, out_features / n_groups] of x's dtype and device. x: [..., n_groups, in_features], as DenseLinear's.

        Raises InputError, ClosedError, UnavailableError, as DenseLinear.
        """
        if torch.compiler.is_compiling():
            n, k = self.out_features // self.n_groups, self.in_features
            return on_cpu(self._traced, x, (self.n_groups, k), (self.n_groups, n))
        n, k = self.group.linears[0].shape
        if is_plain(x) and x.shape[-2:] == (self.n_groups, k):
            return grouped_products(self.group, x)
        return on_cpu(self._product, x, (self.n_groups, k), (self.n_groups, n))

    def _traced(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            return outside_of_graphs(self, x)
        return _operator(x, self.out_features // self.n_groups, self._handle)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        n, k = self.group.linears[0].shape
        if x.requires_grad and torch.is_grad_enabled():
            self.group.backward(np.empty((0, self.n_groups, n), np.float32))
        return Product.apply(self.group, x, (self.n_groups, k), (self.n_groups, n))

    def extra_repr(self) -> str:
        first = self.group.linears[0]
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, n_groups={self.n_groups}"
        return f"{sizes}, {first.format.description}"

    def __deepcopy__(self, memo: dict[int, Any]) -> DenseGroupedLinear:
        """As any module's, but for the group, which copies share."""
        return copied(self, memo, self.group)


_operator = held_operator(
    "grouped_linear",
    "Tensor x, SymInt outputs",
    lambda group, x, outputs: grouped_products(group, x),
    lambda x, outputs: x.new_empty((*x.shape[:-1], outputs)),
)
