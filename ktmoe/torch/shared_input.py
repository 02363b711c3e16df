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

    Of each thread it keeps the outputs of the last tensor until they are taken. They are dropped with that tensor.
    """

    def __init__(self, linears: Sequence[Linear]):
        self._group = LinearGroup(linears)
        self._local = threading.local()

    def take(self, index: int, x: torch.Tensor) -> torch.Tensor | None:
        """y of one Linear; None where it has to be computed by itself. x: as products() takes it."""
        if x.is_inference():  # it has no version, so nobody would notice a change
            return None
        linear, kept = self._group.linears[index], self._local.__dict__.get("kept")
        if kept is not None and kept.x() is x and kept.version == x._version:
            y, kept.outputs[index] = kept.outputs[index], None
            return y if linear.packed is not None and linear.replaced == kept.replaced[index] else None
        self._local.kept = kept = _Kept(x, self._group)
        y, kept.outputs[index] = kept.outputs[index], None
        return y


class _Kept:
    __slots__ = ("outputs", "replaced", "version", "x")

    def __init__(self, x: torch.Tensor, group: LinearGroup):
        self.version, self.replaced = x._version, [linear.replaced for linear in group.linears]
        self.outputs = outputs = products(group.linears, x, group.dispatches)
        self.x = weakref.ref(x, lambda _: outputs.clear())
