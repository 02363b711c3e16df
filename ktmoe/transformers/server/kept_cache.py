"""The key-value cache of the last answer, kept for the next one: what both texts begin with is not computed again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import Cache
from transformers.cache_utils import DummyLayer, DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from ktmoe.transformers.growing_cache import GrowingLayer, GrowingSlidingLayer

#: Layers that keep all tokens, each for itself. What else is derived from them may have states that crop() does not know.
_WHOLE_TEXT = (DynamicLayer, GrowingLayer, DynamicIndexedLayer, DummyLayer)


@dataclass(frozen=True)
class _Mark:
    """The states that layers had after so many tokens, by the layer's index; those that keep all tokens are left out."""

    length: int
    states: dict[int, dict]


class KeptCache:
    """A cache and the tokens of one text that it holds. It can go back to what another text shares with them.

    Layers that keep all tokens go back to any of them. Others, such as sliding windows and recurrent states, forget what they
    do not need: they go back to the mark, a copy of their states.
    """

    def __init__(self, cache: Cache):
        self.cache = cache
        self.tokens = torch.empty(0, dtype=torch.int64)
        self._whole = True
        self._mark: _Mark | None = None

    def forgets(self) -> bool:
        """Whether it has layers that need the mark."""
        return any(type(layer) not in _WHOLE_TEXT for layer in self.cache.layers)

    def shared(self, tokens: torch.Tensor) -> int:
        """How many tokens this text, int64 [n], and the kept one begin with in common; not the last one of this text."""
        most = min(len(tokens) - 1, len(self.tokens))
        other = (tokens[:most] != self.tokens[:most].to(tokens.device)).nonzero()
        return int(other[0, 0]) if len(other) else most

    def before_mark(self, length: int) -> int:
        """How many tokens the mark is behind this length; 0 if there is none, or it is not behind."""
        return max(self._mark.length - length, 0) if self._mark else 0

    def go_back(self, length: int) -> int:
        """Forget all but that many tokens, which it holds, or fewer if it must; how many are left. 0: it is of no more use."""
        if length == 0:
            return 0
        if length < len(self.tokens) or not self._whole:
            layers = dict(enumerate(self.cache.layers))
            fixed = [index for index, layer in layers.items() if not self._crops(layer)]
            if fixed:
                if self._mark is None or self._mark.length > length or not self._mark.states.keys() >= set(fixed):
                    return 0
                length = self._mark.length
            for index, layer in layers.items():
                if index in fixed:
                    vars(layer).update(_copied(self._mark.states[index], {}))
                elif type(layer) is not DummyLayer:
                    layer.crop(min(length - layer.get_seq_length(), 0))
        if self.before_mark(length):  # what follows is another text
            self._mark = None
        self.tokens, self._whole = self.tokens[:length], True
        return length

    def _crops(self, layer: object) -> bool:
        if type(layer) in (DynamicSlidingWindowLayer, GrowingSlidingLayer):
            return layer.get_seq_length() < layer.get_max_length()  # it has lost nothing yet
        if type(layer) is DynamicIndexedLayer:
            return self._whole  # else the keys of its indexer may be one step ahead
        return type(layer) in _WHOLE_TEXT

    def mark(self) -> None:
        """Put the mark here."""
        states = {i: _copied(vars(layer), {}) for i, layer in enumerate(self.cache.layers) if type(layer) not in _WHOLE_TEXT}
        self._mark = _Mark(len(self.tokens), states)

    def interrupted(self) -> None:
        """Some layers may hold more than the tokens: the model was left within a step."""
        self._whole = False


def _copied(value: object, known: dict[int, torch.Tensor]) -> object:
    """Tensors are copied, each once; a view becomes as small as it looks."""
    if isinstance(value, torch.Tensor):
        return known.setdefault(id(value), value.clone())
    if isinstance(value, dict):
        return {name: _copied(part, known) for name, part in value.items()}
    if isinstance(value, list):
        return [_copied(part, known) for part in value]
    return value
