"""JoinedLinear: rows of several packed matrices, in any order, where a model has one torch.nn.Linear."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ktmoe.errors import InputError
from ktmoe.torch.absent_weight import LinearWithoutWeight
from ktmoe.torch.linear import DenseLinear, share_input


class JoinedLinear(LinearWithoutWeight):
    """y = x W^T + b, where W has the rows of ktmoe.Linears of one k. The outputs are put in order, and no weight is moved.

    name: of the matrix. parts: DenseLinears, whose rows come one after another. order: int [n], which of these rows each row of
    W is; None: they are in order.

    It has no parameters, as a DenseLinear. Attributes: parts. Raises InputError for parts of different k, and for an order that
    has not each row once.
    """

    def __init__(self, name: str, parts: Sequence[DenseLinear], order: np.ndarray | None = None):
        sizes = [part.out_features for part in parts]
        if len({part.in_features for part in parts}) != 1:
            raise InputError(f"{name}: parts must have one k, found {[part.in_features for part in parts]}")
        super().__init__(name, parts[0].in_features, sum(sizes))
        if order is not None and not np.array_equal(np.sort(order), np.arange(sum(sizes))):
            raise InputError(f"{name}: order must have each of {sum(sizes)} rows once")
        self.parts = torch.nn.ModuleList(parts)
        self.register_buffer("order", None if order is None else torch.from_numpy(order.astype(np.int64)), persistent=False)
        if len(parts) > 1:
            share_input(list(parts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., out_features], as DenseLinear.forward() has it."""
        found = [part(x) for part in self.parts]
        y = found[0] if len(found) == 1 else torch.cat(found, -1)
        return y if self.order is None else y.index_select(-1, self.order)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"
