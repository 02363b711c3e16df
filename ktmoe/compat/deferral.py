"""Deferred experts: which run now, which in a second task, and which layer's result takes what that gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np


def split(ids: np.ndarray, scores: np.ndarray, protected: int, on_gpu: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """(ids to run now, ids to run later or None if there are none); -1 where a slot is in the other one, or in neither.

    protected: a token's slots with so many greatest scores run now, of equal ones the first; so does, in all tokens, any expert
    of such a slot. on_gpu: bool [experts], to skip; these count among a token's slots nevertheless.
    """
    known = (ids >= 0) & (ids < len(on_gpu))
    experts = np.where(known, ids, 0)
    here = known & ~on_gpu[experts]
    if protected >= ids.shape[1]:
        return np.where(here, ids, -1), None
    first = np.argsort(-scores, axis=1, kind="stable")[:, : max(protected, 0)]
    urgent = np.zeros(len(on_gpu), bool)
    urgent[np.take_along_axis(ids, first, 1)[np.take_along_axis(known, first, 1)]] = True
    later = here & ~urgent[experts]
    return np.where(here & ~later, ids, -1), np.where(later, ids, -1) if later.any() else None


@dataclass
class Pending:
    """What a layer's deferred experts will give: bfloat16 bits [tokens, hidden], or None if nothing was deferred."""

    successor: int
    shape: tuple[int, int]
    output: Future
    release: Callable[[], None]

    def drop(self) -> None:
        """Give the memory back once the output is there: nobody takes it."""
        self.output.add_done_callback(lambda _: self.release())


class Passes:
    """Where the forward passes of the process's models stand. The caller holds the lock that orders submissions.

    A model is what its layers' wrappers have in common. What a layer deferred belongs to the next layer that is loaded, and
    only to a batch of the same shape: any other submission of the model means that the pass was broken off, and what was
    deferred is dropped with it. A layer that none follows has nothing to add to, and must not defer.
    """

    def __init__(self) -> None:
        self.layers: dict[object, Counter[int]] = {}
        self.pending: dict[object, Pending] = {}

    def join(self, model, layer: int) -> None:
        self.layers.setdefault(model, Counter())[layer] += 1

    def leave(self, model, layer: int) -> None:
        layers = self.layers[model]
        layers[layer] -= 1
        if not layers[layer]:
            del layers[layer]
        if not layers:
            del self.layers[model]
            self._drop(model)

    def successor(self, model, layer: int) -> int | None:
        """The layer that follows, None if none does."""
        return min((other for other in tuple(self.layers.get(model, ())) if other > layer), default=None)

    def take(self, model, layer: int, shape: tuple[int, int]) -> Pending | None:
        """Take what was deferred for this layer and batch; None if nothing was. What else the model deferred is dropped."""
        pending = self.pending.get(model)
        if pending is None or (pending.successor, pending.shape) != (layer, shape):
            self._drop(model)
            return None
        return self.pending.pop(model)

    def put(self, model, pending: Pending) -> None:
        self._drop(model)
        self.pending[model] = pending

    def reset(self) -> None:
        """Drop what is pending, of all models."""
        for model in list(self.pending):
            self._drop(model)

    def abandon(self) -> None:
        """Forget what is pending: it belongs to another process."""
        self.pending.clear()

    def _drop(self, model) -> None:
        if (pending := self.pending.pop(model, None)) is not None:
            pending.drop()
