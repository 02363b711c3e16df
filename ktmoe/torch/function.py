"""The autograd function of a layer's experts: ktmoe computes both passes, and torch keeps what is between them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from ktmoe.arrays import as_numpy
from ktmoe.training import Lora, Saved

#: Arguments of _Experts.forward() before the adapter's tensors: passes, alpha, projections, save, x, ids, weights, shared.
_OTHERS = 8


def differentiable(
    passes: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] | None = None,
    alpha: float = 1.0,
    shared_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """y [tokens, hidden] of hidden_states' dtype and device, with gradients of hidden_states, both weights and the adapter.

    passes: a ktmoe.training.Training, or another object with its forward() and backward(). hidden_states: [tokens, hidden],
    bfloat16 or float32, or float16, which goes by way of float32; float64 is for references. What is on a GPU is copied to the
    CPU and back. top_k_index, top_k_weights: [tokens, top_k]. pairs, alpha: of Lora; None: no adapter. shared_weights:
    [tokens, num_shared], for passes with shared experts; None: 1. Nothing is kept where nothing requires grad.
    """
    pairs = pairs or {}
    x = hidden_states.cpu()
    x = x.float() if x.dtype == torch.float16 else x
    ids, weights = top_k_index.cpu(), top_k_weights.cpu()
    weights = weights if x.dtype == torch.float64 else weights.float()
    shared = None if shared_weights is None else shared_weights.cpu().to(weights.dtype)
    tensors = [tensor for pair in pairs.values() for tensor in pair]
    inputs = [tensor for tensor in (x, weights, shared, *tensors) if tensor is not None]
    save = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    return _Experts.apply(passes, alpha, tuple(pairs), save, x, ids, weights, shared, *tensors).to(hidden_states)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        passes: Any,
        alpha: Any,
        projections: Any,
        save: Any,
        x: Any,
        ids: Any,
        weights: Any,
        shared: Any,
        *tensors: Any,
    ) -> Any:
        lora = _lora(projections, tensors, alpha)
        besides = {} if shared is None else {"shared_weights": _given(shared)}  # which other passes need not know
        y, saved = passes.forward(_given(x), as_numpy(ids, "expert_ids"), _given(weights), lora, save=save, **besides)
        if save:
            ctx.passes, ctx.alpha, ctx.projections = passes, alpha, projections
            ctx.saved, kept = _taken_apart(saved)
            # torch frees them after the backward pass, and refuses one if the adapter was changed in between
            ctx.save_for_backward(*kept, *tensors)
        return y if isinstance(y, torch.Tensor) else torch.from_numpy(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Any) -> Any:
        everything = ctx.saved_tensors
        count = len(everything) - 2 * len(ctx.projections)
        tensors = everything[count:]
        needs = ctx.needs_input_grad
        of_weights = needs[6] or needs[7]
        wanted = [name for name, need in (("x", needs[4]), ("weights", of_weights), ("lora", any(needs[_OTHERS:]))) if need]
        gradients = ctx.passes.backward(
            _put_together(ctx.saved, everything[:count]),
            _given(grad_y),
            _lora(ctx.projections, tensors, ctx.alpha),
            wanted=wanted,
        )
        of_lora = [None] * len(tensors)
        if gradients.lora is not None:
            made = [array for projection in ctx.projections for array in gradients.lora[projection]]
            pairs = zip(made, tensors, needs[_OTHERS:], strict=True)
            of_lora = [torch.from_numpy(array).to(tensor.dtype) if need else None for array, tensor, need in pairs]
        of_x, of_weights = _tensor(gradients.x), _tensor(gradients.weights)
        of_shared = _tensor(gradients.shared_weights) if needs[7] else None
        return (None, None, None, None, of_x, None, of_weights, of_shared, *of_lora)


def _lora(projections: tuple[str, ...], tensors: tuple[torch.Tensor, ...], alpha: float) -> Lora | None:
    """Numbers that are not finite take part as they do in torch, and are not searched for in each call."""
    pairs = dict(zip(projections, zip(*[map(_given, tensors)] * 2, strict=True), strict=True))
    return Lora(pairs, alpha, finite=False) if pairs else None


def _given(tensor: torch.Tensor) -> Any:
    """float64, which only references take, as arrays."""
    tensor = tensor.detach()
    return tensor.numpy() if tensor.dtype == torch.float64 else tensor


def _tensor(value: Any) -> torch.Tensor | None:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _taken_apart(saved: Any) -> tuple[object, list[torch.Tensor]]:
    """What stands for a Saved without its arrays, and these as tensors. Of another object nothing is known."""
    if not isinstance(saved, Saved):
        return saved, []
    arguments = {name: getattr(saved, name) for name in ("x", "ids", "weights", "mask")}
    own = [*arguments.values(), *(array for array in saved.arrays or () if array is not None)]
    frame = replace(saved, arrays=None, **{name: array[:0].copy() for name, array in arguments.items()})
    return frame, [torch.from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array) for array in own]


def _put_together(saved: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    """_taken_apart() the other way round."""
    if not isinstance(saved, Saved):
        return saved
    x, ids, weights, mask, *rest = (tensor.detach().numpy() for tensor in tensors)
    arrays = (rest[0], rest[1], rest[2] if len(rest) > 2 else None) if rest else None
    return replace(saved, x=x.view(saved.x.dtype), ids=ids, weights=weights, mask=mask, arrays=arrays)
