"""Host memory of calls: two slots by layer, kept for the last batch size, and for good for captured ones."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class Key(NamedTuple):
    """What memory fits: side says where the caller's arrays are (sides.py)."""

    side: object
    slot: int
    tokens: int
    hidden: int
    top_k: int


class Buffers:
    """Memory of one call. x, y, late: uint16, bfloat16 bits, [tokens, hidden]; ids: int64, weights: float32, [tokens, top_k].

    Two may hold them: who waits for y, and the layer that takes what was deferred. The last release() gives them back.
    """

    def __init__(self, pool: Pool, key: Key):
        self.key = key
        self._pool = pool
        self._holders = 0
        allocate = key.side.allocate
        self.x, self.x_owner = allocate((key.tokens, key.hidden), np.uint16)
        self.ids, self.ids_owner = allocate((key.tokens, key.top_k), np.int64)
        self.weights, self.weights_owner = allocate((key.tokens, key.top_k), np.float32)
        self.y = self.y_owner = None
        self.late = None  # numpy alone: it never leaves the host
        self.kept = {}  # what a side keeps with them

    @property
    def captured(self) -> bool:
        """Whether these are of a captured batch size: then y's memory stays theirs."""
        return self.key.tokens in self._pool.captured

    def begin(self) -> None:
        if self.y is None:
            self.y, self.y_owner = self.key.side.allocate((self.key.tokens, self.key.hidden), np.uint16)

    def hold(self) -> None:
        with self._pool.lock:
            self._holders += 1

    def release(self) -> None:
        with self._pool.lock:
            self._holders -= 1
            if not self._holders:
                self._pool.give(self)


@dataclass
class Pool:
    """Buffers that no call uses."""

    captured: list[int] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    kept: dict[Key, Buffers] = field(default_factory=dict)
    last: dict[Key, Buffers] = field(default_factory=dict)

    def take(self, key: Key) -> Buffers:
        with self.lock:
            buffers = self.kept.pop(key, None) or self.last.pop(key, None) or Buffers(self, key)
            buffers.begin()
            buffers.hold()
            return buffers

    def give(self, buffers: Buffers) -> None:
        key = buffers.key
        if buffers.captured:
            self.kept.setdefault(key, buffers)
            return
        if any(other.tokens != key.tokens for other in tuple(self.last)):  # a finalizer may release others meanwhile
            self.last.clear()
        self.last.setdefault(key, buffers)

    def clear(self) -> None:
        with self.lock:
            self.kept.clear()
            self.last.clear()
