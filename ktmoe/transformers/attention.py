"""Attention by torch's flash kernel for CPUs, with sinks, for models that transformers computes in small steps or with copies.

A sink is one more logit of each head that takes its share of the softmax and has no value. With the log-sum-exp of the other
logits, which the kernel returns, softmax with a sink is softmax without one, times sigmoid(lse - sink).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from ktmoe.torch.operators import operator

NAME = "ktmoe"
#: The same for models that append numbers to the mask before they attend: it has to be one of numbers, and never None.
NAME_OF_ADDED = "ktmoe_added_mask"

#: Models whose eager attention is softmax with a sink for each head, and nothing else, and which name computes it.
WITH_SINKS = {
    "gpt_oss": NAME,
    "granitemoe_swa": NAME,
    "mimo_v2_flash": NAME,
    "deepseek_v4": NAME_OF_ADDED,
}

_ROWS = 256  # queries of one block

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What transformers asks of an attention: [batch, queries, heads, value dim], and the weights or None.

    query: [batch, heads, queries, dim]. key: [batch, key heads, keys, dim]. value: of at most that dim. attention_mask: as
    mask() makes it, or numbers. s_aux: the sinks [heads]. Gradients, other devices and what this kernel lacks are left to
    transformers' own attention.
    """
    # in training all layers attend alike, also those before the first adapter, whose queries require no grad
    asked = module.training or query.requires_grad or key.requires_grad or value.requires_grad
    trains = torch.is_grad_enabled() and asked
    special = any(kwargs.get(name) is not None for name in ("softcap", "position_bias", "cache"))
    fits = query.dtype == key.dtype == value.dtype and query.shape[-1] >= value.shape[-1]
    if trains or special or dropout or not fits or query.device.type != "cpu":
        return _by_transformers(module, query, key, value, attention_mask, dropout, scaling, s_aux, **kwargs)
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    computed = _operator if torch.compiler.is_compiling() else _with_sinks
    return computed(query, key, value, attention_mask, s_aux, bool(causal), scaling), None


def _with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    causal: bool,
    scaling: float | None,
) -> torch.Tensor:
    """[batch, queries, heads, value dim], contiguous."""
    width = value.shape[-1]
    if width < query.shape[-1]:  # the kernel wants one dim; sdpa without it converts all keys to float32
        value = torch.nn.functional.pad(value, (0, query.shape[-1] - width))
    output, lse = _attend(query, key, value, mask, causal, scaling)
    output = output[..., :width]
    if sinks is not None:
        output = output * torch.sigmoid(lse - sinks.float()[:, None])[..., None].to(output.dtype)
    return output.transpose(1, 2).contiguous()


def _in_graphs(query: Any, key: Any, value: Any, mask: Any, sinks: Any, causal: Any, scaling: Any) -> torch.Tensor:
    """_with_sinks(), of the masks that transformers makes where torch.compile traces it: there it never leaves one out."""
    if mask is not None and mask.dtype == torch.bool and causal:
        queries, keys = mask.shape[2:]
        plain = torch.ones(queries, keys, dtype=torch.bool).tril() if queries > 1 else mask.new_ones(1)
        if queries in (1, keys) and bool((mask == plain).all()):
            mask = None
    return _with_sinks(query, key, value, mask, sinks, causal, scaling)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool, scaling: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention without sinks, [batch, heads, queries, dim], and the log-sum-exp, float32 [batch, heads, queries]."""
    batch, heads, queries, dim = query.shape
    shared = heads // key.shape[1]
    if queries == 1:
        # the heads that share keys are rows of one head: each key is read once
        query = query.reshape(batch, heads // shared, shared, dim)
        if mask is not None and mask.shape[1] > 1:
            mask = mask.reshape(mask.shape[0], heads // shared, shared, -1)
        output, lse = _flash(query, key, value, 0.0, False, attn_mask=_added(mask, query.dtype), scale=scaling)
        return output.reshape(batch, heads, 1, dim), lse.reshape(batch, heads, 1)
    if key.shape[1] == 1:
        key, value = (states.expand(-1, heads, -1, -1) for states in (key, value))
    elif shared > 1:
        key, value = (states.repeat_interleave(shared, 1) for states in (key, value))
    if mask is None:
        return _flash(query, key, value, 0.0, causal, scale=scaling)
    parts = [
        _flash(query[:, :, rows], key[:, :, seen], value[:, :, seen], 0.0, False, attn_mask=added, scale=scaling)
        for rows, seen, added in _blocks(mask, query.dtype)
    ]
    return torch.cat([output for output, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def _blocks(mask: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Some queries at a time, the keys from the first to the last that any of them sees, and what is added to their logits.

    A window of 128 keys in a prompt of 16,384 tokens is 1 % of the products then, and the mask in numbers is small.
    """
    for start in range(0, mask.shape[2], _ROWS):
        rows = slice(start, start + _ROWS)
        added = _added(mask[:, :, rows], dtype)
        columns = (added > torch.finfo(dtype).min).flatten(0, 2).any(0).nonzero()
        seen = slice(int(columns[0]), int(columns[-1]) + 1) if len(columns) else slice(0, 1)
        yield rows, seen, added[..., seen]


def _added(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A mask as numbers that are added to logits: of a boolean one 0, or the least number of dtype where nothing is seen."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)


_operator = operator(
    "attention",
    "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? sinks, bool causal, float? scaling",
    _in_graphs,
    lambda query, key, value, *others: query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3])),
)


def _by_transformers(
    module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: Any, scaling: Any, sinks: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' own attention of this module: sdpa, or eager if it has sinks, which sdpa does not take."""
    if sinks is None:
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
    if mask is None and query.shape[2] > 1:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    mask = _added(mask, query.dtype)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager(module, query, key, value, mask, dropout=dropout, scaling=scaling, s_aux=sinks, **kwargs)


def mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Which keys a query sees, bool [batch, 1, queries, keys], or None if one query sees all, or each all up to its own.

    The arguments are those of transformers' sdpa_mask(), which makes it.
    """
    seen = sdpa_mask(*args, **kwargs)
    if seen is not None and seen.shape[2] == 1 and not torch.compiler.is_compiling() and bool(seen.all()):
        return None
    return seen


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
AttentionInterface.register(NAME_OF_ADDED, attention)
AttentionMaskInterface.register(NAME_OF_ADDED, eager_mask)
