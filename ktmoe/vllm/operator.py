"""The torch operator that computes a layer's experts. torch.compile takes it as it is, and does not look into it."""

from __future__ import annotations

import itertools
import weakref

import torch

from ktmoe.layer import MoELayer

_NAME = "ktmoe::experts"
_layers: weakref.WeakValueDictionary[int, MoELayer] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def handle(layer: MoELayer) -> torch.Tensor:
    """int64 [1]: what experts() finds the layer by, as long as somebody holds it.

    It is a tensor, so that a compiled graph has no layer's number in it and is the same for all layers and processes.
    """
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor([number], dtype=torch.int64, device="cpu")


def experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layer: torch.Tensor) -> torch.Tensor:
    """y [tokens, hidden] in x's dtype, which goes by way of float32 if it is neither bfloat16 nor float32.

    x: [tokens, hidden]. ids, weights: [tokens, top_k]; an id outside the experts adds zero. layer: of handle().
    """
    return torch.ops.ktmoe.experts(x, ids, weights, layer)


def _experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layer: torch.Tensor) -> torch.Tensor:
    given = x if x.dtype in (torch.bfloat16, torch.float32) else x.float()
    return _layers[layer.item()].forward(given, ids, weights.float()).to(x.dtype)


def _shape(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layer: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


torch.library.define(_NAME, "(Tensor x, Tensor ids, Tensor weights, Tensor layer) -> Tensor")
torch.library.impl(_NAME, "cpu", _experts)
torch.library.register_fake(_NAME, _shape)
