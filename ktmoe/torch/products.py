"""Products of packed matrices with torch tensors, without gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ktmoe.layer import MoELayer
from ktmoe.linear import Linear
from ktmoe.linear_group import LinearGroup
from ktmoe.linear_products import compute

#: Dtypes that Linears take, and a dtype of the same size that numpy has.
NUMPY_DTYPES = {torch.bfloat16: torch.uint16, torch.float32: torch.float32}


def is_plain(x: Any) -> bool:
    """Whether products() takes x: a strided tensor of the CPU, bfloat16 or float32, of no gradient."""
    return (
        type(x) is torch.Tensor
        and x.is_cpu
        and x.dtype in NUMPY_DTYPES
        and x.layout is torch.strided
        and not (x.requires_grad and torch.is_grad_enabled())
    )


def products(
    linears: Sequence[Linear],
    x: torch.Tensor,
    dispatches: Sequence[Sequence[int]] = ((0,),),
) -> list[torch.Tensor]:
    """[..., n] of x's dtype, of each Linear; each is a tensor of its own. x: [..., k], plain. dispatches: of compute()."""
    bits, ahead = NUMPY_DTYPES[x.dtype], x.shape[:-1]
    outs = [x.new_empty((*ahead, linear.shape[0])) for linear in linears]
    compute(linears, _rows(x, bits), (0,) * len(outs), [_rows(out, bits) for out in outs], dispatches)
    return outs


def grouped_products(group: LinearGroup, x: torch.Tensor) -> torch.Tensor:
    """[..., linears, n] of x's dtype, of a group of inputs="own". x: [..., linears, k], plain."""
    count, (n, k) = len(group.linears), group.linears[0].shape
    out = x.new_empty((*x.shape[:-1], n))
    rows, outs = (_rows(each, NUMPY_DTYPES[x.dtype], count) for each in (x, out))
    columns, ys = [i * k for i in range(count)], [outs[:, i * n : (i + 1) * n] for i in range(count)]
    compute(group.linears, rows, columns, ys, group.dispatches)
    return out


def experts_product(layer: MoELayer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[tokens, hidden] of x's dtype, of a layer's experts. x: plain. ids, weights: [tokens, top_k] on the CPU."""
    bits = NUMPY_DTYPES[x.dtype]
    weights = weights.detach() if weights.requires_grad else weights
    y = layer.forward(_rows(x, bits), ids.numpy(), weights.float().numpy())
    return torch.from_numpy(y if bits is torch.float32 else y.view(np.int16)).view(x.dtype)


def _rows(x: torch.Tensor, bits: torch.dtype, joined: int = 1) -> np.ndarray:
    """[any, joined * x's last size] of a tensor's memory, or of a copy if its rows are apart."""
    # numpy's reshape costs a seventh of torch's
    return (x.detach() if x.requires_grad else x).view(bits).numpy().reshape(-1, joined * x.shape[-1])
