"""The torch operators that compute a layer's experts, and a dense layer. torch.compile does not look into them."""

from __future__ import annotations

import torch

from ktmoe.layer import MoELayer
from ktmoe.linear import Linear
from ktmoe.torch.operators import handle_of, held_operator
from ktmoe.torch.products import NUMPY_DTYPES, experts_product, products


def hold(module: torch.nn.Module, packed: MoELayer | Linear) -> None:
    """Let operators find what computes a module by the module's buffer `ktmoe`. The module's method holds it.

    It stays the same tensor when weights are loaded again: a compiled graph may have it.
    """
    handle, new = module.__dict__.get("ktmoe_handle"), handle_of(packed)
    if handle is None:
        handle = module.__dict__["ktmoe_handle"] = new
    else:
        handle.copy_(new)
    module.register_buffer("ktmoe", handle, persistent=False)  # again: vLLM takes it away before it loads again


def _experts(layer: MoELayer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return experts_product(layer, _taken(x), ids, weights).to(x.dtype)


def _product(linear: Linear, x: torch.Tensor, outputs: int) -> torch.Tensor:
    return products((linear,), _taken(x))[0].to(x.dtype)


def _taken(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype in NUMPY_DTYPES else x.float()


#: (x [tokens, hidden], ids [tokens, top_k], weights [tokens, top_k], module.ktmoe) -> y [tokens, hidden] in x's dtype, which
#: goes by way of float32 if it is neither bfloat16 nor float32. An id outside the experts adds zero.
experts = held_operator(
    "experts", "Tensor x, Tensor ids, Tensor weights", _experts, lambda x, ids, weights: x.new_empty(x.shape)
)
#: (x [..., k], n, module.ktmoe) -> y [..., n], likewise.
product = held_operator(
    "product", "Tensor x, SymInt outputs", _product, lambda x, outputs: x.new_empty((*x.shape[:-1], outputs))
)
