"""A key-value cache that grows in place: transformers' own copies all of a layer's keys and values for each new token."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

_LEAST_SPARE = 256  # tokens


class _Room:
    """The memory of a layer's keys or values, with room for tokens that are still to come.

    A layer's tensor is a view of it, and any method of transformers may replace that: cut it, or reorder it into memory of its
    own. So where the tokens stand is read from the tensor itself.
    """

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None  # [batch, heads, tokens, dim], contiguous

    def append(self, kept: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Both in a row, [batch, heads, tokens, dim]; kept is copied only if no room is left behind it. Empty: of one axis."""
        count = kept.shape[2] if kept.dim() == 4 else 0
        start = self._start(kept) if count else None
        total = count + new.shape[2]
        if start is None or start + total > self._buffer.shape[2]:
            batch, heads, _, dim = new.shape
            buffer = new.new_empty(batch, heads, total + max(total // 4, _LEAST_SPARE), dim)
            if count:
                buffer[:, :, :count] = kept
            self._buffer, start = buffer, 0
        self._buffer[:, :, start + count : start + total] = new
        return self._buffer[:, :, start : start + total]

    def _start(self, kept: torch.Tensor) -> int | None:
        """The token of the buffer at which kept begins; None if it is no view of its tokens."""
        buffer = self._buffer
        if buffer is None or (buffer.is_inference() and not torch.is_inference_mode_enabled()):
            return None  # torch allows no writing into it
        if kept.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr():
            return None
        same = kept.shape[:2] == buffer.shape[:2] and kept.shape[3] == buffer.shape[3] and kept.stride() == buffer.stride()
        start, rest = divmod(kept.storage_offset(), buffer.shape[3])
        return start if same and not rest and start + kept.shape[2] <= buffer.shape[2] else None


def _can_grow(layer: DynamicLayer, new: torch.Tensor) -> bool:
    """Whether new may be written behind the layer's tokens: not if gradients may need these, or dtype or device differ, nor
    where torch.compile traces it, which cannot know whose memory a tensor is."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return layer.dtype == new.dtype and layer.device == new.device


class GrowingLayer(DynamicLayer):
    """All keys and values of a layer, [batch, heads, tokens, dim], as DynamicLayer has them, with room behind them.

    What update() returns are views: they hold until crop() was called and other tokens have taken the place.
    """

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self._rooms = _Room(), _Room()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values, with the new ones behind them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if not _can_grow(self, key_states):
            return super().update(key_states, value_states, *args, **kwargs)
        self.keys = self._rooms[0].append(self.keys, key_states)
        self.values = self._rooms[1].append(self.values, value_states)
        return self.keys, self.values


class GrowingSlidingLayer(DynamicSlidingWindowLayer):
    """The last keys and values of a layer, as DynamicSlidingWindowLayer has them, with room behind them."""

    def __init__(self, sliding_window: int, **kwargs: Any):
        super().__init__(sliding_window, **kwargs)
        self._rooms = _Room(), _Room()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values that the new tokens may see, and the new ones behind them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        count, window = key_states.shape[-2], self.sliding_window
        if not _can_grow(self, key_states) or (count >= window and not self.record_past):
            # a long prompt is not kept: its tail alone goes into the room, with the next token
            return super().update(key_states, value_states, *args, **kwargs)
        self.cumulative_length += count
        seen = []
        for room, kept, new in zip(self._rooms, (self.keys, self.values), (key_states, value_states), strict=True):
            seen.append(room.append(kept, new))
        past = slice(None) if self.record_past else slice(1 - window, None)
        self.keys, self.values = (full[:, :, past] for full in seen)
        visible = slice(1 - window - count, None) if self.record_past else slice(None)
        return seen[0][:, :, visible], seen[1][:, :, visible]


def grow(cache: DynamicCache) -> DynamicCache:
    """The same cache, whose layers grow in place. Those of other kinds, and those that hold tokens, stay as they are."""
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = GrowingLayer
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and not layer.is_initialized:
            cache.layers[index] = GrowingLayer()
        elif type(layer) is DynamicSlidingWindowLayer and not layer.is_initialized:
            cache.layers[index] = GrowingSlidingLayer(layer.sliding_window)
            cache.layers[index].record_past = layer.record_past
    return cache


def _before_forward(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache = kwargs.get("past_key_values")
    if type(cache) is DynamicCache and not cache.offloading:
        grow(cache)


def grow_caches(model: PreTrainedModel) -> None:
    """Let the caches of model grow in place: those that generate() makes, and those that its caller passes empty."""
    model.register_forward_pre_hook(_before_forward, with_kwargs=True)
