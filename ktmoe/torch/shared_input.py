"""Matrices that a model calls one after another with the same tensor, computed by one dispatch of the threads."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import torch

from ktmoe.linear import Linear
from ktmoe.linear_group import LinearGroup
from ktmoe.torch.products import products


class SharedInput:
    """What share_input() gives its modules. linears: as LinearGroup takes them.

    Of each thread it keeps the outputs of the last tensor until they are taken. They are dropped with that tensor. If some are
    not taken twice in a row, the model calls these modules with different tensors: each is computed by itself from then on.
    """

    def __init__(self, linears: Sequence[Linear]):
        self._group = LinearGroup(linears)
        self._local = threading.local()
        self._wasted = 0  # calls in a row whose outputs were not all taken

    def take(self, index: int, x: torch.Tensor) -> torch.Tensor | None:
        """y of one Linear; None where it has to be computed by itself. x: as products() takes it."""
        # an inference tensor has no version, so nobody would notice a change
        if self._wasted >= 2 or x.is_inference():
            return None
        linear, kept = self._group.linears[index], self._local.__dict__.get("kept")
        if kept is not None and kept.x() is x and kept.version == x._version:
            y = kept.take(index)
            return y if linear.packed is not None and linear.replaced == kept.replaced[index] else None
        if kept is not None:
            self._wasted = self._wasted + 1 if kept.left else 0
        self._local.kept = kept = _Kept(x, self._group)
        return kept.take(index)


class _Kept:
    __slots__ = ("left", "outputs", "replaced", "version", "x")

    def __init__(self, x: torch.Tensor, group: LinearGroup):
        self.version, self.replaced = x._version, [linear.replaced for linear in group.linears]
        self.outputs = outputs = products(group.linears, x, group.dispatches)
        self.left = len(outputs)  # to be taken
        self.x = weakref.ref(x, lambda _: outputs.clear())

    def take(self, index: int) -> torch.Tensor | None:
        y, self.outputs[index] = self.outputs[index], None
        self.left -= y is not None
        return y
