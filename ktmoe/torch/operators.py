"""Operators of torch for what is packed, so that torch.compile and torch.export have one node for each call of it.

An operator takes tensors and numbers only. So what computes it is found by a handle. That is a tensor, not a number, so that
layers that differ in nothing else share what torch compiled for one of them.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch

_numbers = itertools.count()
_holders: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
_library = torch.library.Library("ktmoe", "FRAGMENT")


def handle_of(holder: Any) -> torch.Tensor:
    """A new handle by which operators find an object, as long as somebody else holds it."""
    number = next(_numbers)
    _holders[number] = holder
    with torch.inference_mode(False):
        return torch.tensor(number, device="cpu")


def held_operator(name: str, arguments: str, compute: Callable[..., torch.Tensor], fake: Callable[..., torch.Tensor]) -> Any:
    """operator() of the arguments (arguments, Tensor handle). compute: called as compute(holder, *arguments)."""
    return operator(
        name,
        f"{arguments}, Tensor handle",
        lambda *given: compute(_holders[given[-1].item()], *given[:-1]),
        lambda *given: fake(*given[:-1]),
    )


def operator(name: str, arguments: str, compute: Callable[..., torch.Tensor], fake: Callable[..., torch.Tensor]) -> Any:
    """Register torch.ops.ktmoe.<name>(arguments) -> Tensor, which has no gradient, and return it.

    compute: called as compute(*arguments); it returns a tensor of its own. fake: called alike; it returns an empty one of that
    shape, dtype and device.
    """
    _library.define(f"{name}({arguments}) -> Tensor")
    _library.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ktmoe::{name}", fake, lib=_library)
    return getattr(torch.ops.ktmoe, name).default
