"""Products of several Linears, at once where a kernel table computes them; and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from ktmoe import arrays
from ktmoe._native import core
from ktmoe.backends.base import PackedMatrix
from ktmoe.errors import asking
from ktmoe.packed_weights import PackedWeights

T = TypeVar("T")


def compute(
    linears: Sequence[PackedWeights[PackedMatrix]],
    x: np.ndarray,
    columns: Sequence[int],
    outs: Sequence[np.ndarray],
    dispatches: Sequence[Sequence[int]] = ((0,),),
) -> None:
    """Write y of each Linear into its out. columns: of x, the first one that each takes. dispatches: which of the Linears are
    computed at once, which lie on the same NUMA nodes."""
    packed: list[Any] = [linear._open_for("forward") for linear in linears]  # all, before anything is written
    if not x.shape[0]:
        return
    x = arrays.contiguous(x)
    native = all(isinstance(each, core.PackedLinear) for each in packed)
    if native and len(dispatches) == 1:
        core.linear_forward(packed, x, columns, outs)
        return
    for those in dispatches:
        if native or all(isinstance(packed[i], core.PackedLinear) for i in those):
            core.linear_forward(_those(packed, those), x, _those(columns, those), _those(outs, those))
            continue
        for i in those:
            linear, column = linears[i], columns[i]
            with asking(linear.backend, linear.name):
                packed[i].forward(arrays.contiguous(x[:, column : column + linear.spec.hidden]), outs[i])


def differentiate(
    linears: Sequence[PackedWeights[PackedMatrix]],
    grads: Sequence[np.ndarray],
    outs: Sequence[np.ndarray],
    dispatches: Sequence[Sequence[int]],
) -> None:
    """The gradients of what linears take, or their sum where outs has one array, rounded once. dispatches: see compute()."""
    packed: list[Any] = [linear._open_for("backward") for linear in linears]
    native = all(isinstance(each, core.PackedLinear) for each in packed)
    if native and len(dispatches) == 1:
        core.linear_backward(packed, grads, outs)
        return
    if native and len(outs) == len(linears):
        for those in dispatches:
            core.linear_backward(_those(packed, those), _those(grads, those), _those(outs, those))
        return
    sums = np.zeros((len(outs), *outs[0].shape), np.float32)
    one = np.empty_like(sums[0])
    for those in dispatches if native else [(i,) for i in range(len(linears))]:
        first = those[0]
        if native:
            core.linear_backward(_those(packed, those), _those(grads, those), [one])
        elif len(one):
            with asking(linears[first].backend, linears[first].name):
                packed[first].backward(arrays.contiguous(grads[first]), one)
        with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaN are results like others
            sums[first % len(outs)] += one
    for out, total in zip(outs, sums, strict=True):
        out[...] = total if out.dtype == np.float32 else total.astype(arrays.BF16).view(np.uint16)


def _those(items: Sequence[T], which: Sequence[int]) -> list[T]:
    return [items[i] for i in which]
