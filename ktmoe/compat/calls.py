"""One forward call: what is computed for it, and what its caller waits for."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from ktmoe.arrays import BF16
from ktmoe.compat.buffers import Buffers
from ktmoe.compat.deferral import Pending, split
from ktmoe.layer import MoELayer


@dataclass(frozen=True)
class Loaded:
    """A layer's packed experts, or what has its forward(). model: what its layers have in common.

    leave: ends what is shared for them, once; None: nothing is.
    """

    layer: MoELayer
    model: tuple[str, int]
    leave: weakref.finalize | None


class Call:
    """One call. Either result() or abandon() comes last, once.

    ready: waits until the arguments are in the buffers. output: of now(), if the worker does that.
    successor: the layer to which what is deferred goes, if any; protected is then as deferral.split() has it, else all slots.
    earlier: what the layer before deferred.
    """

    def __init__(self, loaded: Loaded, buffers: Buffers, dtype, on_gpu: np.ndarray, ready: Callable[[], None]):
        self.loaded = loaded
        self.buffers = buffers
        self.protected = buffers.key.top_k
        self.successor: int | None = None
        self.earlier: Pending | None = None
        self.output: Future | None = None
        self._dtype = dtype
        self._on_gpu = on_gpu
        self._ready = ready
        self._later: np.ndarray | None = None

    def now(self) -> None:
        """Write into buffers.y what the experts give that run now, and what was deferred to this layer.

        As in kt-kernel, what was deferred was rounded to bfloat16; the sum is in fp32 and is rounded once more.
        """
        buffers, layer = self.buffers, self.loaded.layer
        try:
            self._ready()
            ids, self._later = split(buffers.ids, buffers.weights, self.protected, self._on_gpu)
            deferred = None if self.earlier is None else self.earlier.output.result()
            if deferred is None:
                layer.forward(buffers.x, ids, buffers.weights, out=buffers.y)
            else:
                y = layer.forward(_widened(buffers.x), ids, buffers.weights)
                y += _widened(deferred)
                buffers.y[...] = y.astype(BF16).view(np.uint16)
        finally:
            if self.earlier is not None:
                self.earlier.release()

    def late(self) -> np.ndarray | None:
        """Compute the deferred experts, after now(): their output, or None if there are none."""
        if self._later is None:
            return None
        buffers = self.buffers
        if buffers.late is None:
            buffers.late = np.empty_like(buffers.x)
        return self.loaded.layer.forward(buffers.x, self._later, buffers.weights, out=buffers.late)

    def result(self, stream):
        """y, where the arguments were."""
        try:
            if self.output is not None:
                self.output.result()
            return self.buffers.key.side.hand_back(self.buffers, self._dtype, stream)
        finally:
            self.buffers.release()

    def abandon(self) -> None:
        """Give the buffers back once what was queued is done: nobody wants its result."""
        self.output.add_done_callback(lambda _: self.buffers.release())


def _widened(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits as float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
