"""One forward call: what the worker does for it, and what its caller waits for."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from ktmoe.arrays import BF16
from ktmoe.compat.buffers import Buffers
from ktmoe.compat.deferral import Pending, split
from ktmoe.layer import MoELayer


class Call:
    """Both tasks of a call. protected: as deferral.split() has it; all slots unless something is to be deferred."""

    def __init__(self, layer: MoELayer, buffers: Buffers, on_gpu: np.ndarray, ready):
        self._layer = layer
        self._buffers = buffers
        self._on_gpu = on_gpu
        self._ready = ready
        self._later: np.ndarray | None = None
        self.protected = buffers.key.top_k

    def now(self, earlier: Pending | None) -> None:
        """The experts that run now, and what was deferred to this layer, into buffers.y.

        As in kt-kernel, what was deferred was rounded to bfloat16; the sum is in fp32 and is rounded once more.
        """
        buffers = self._buffers
        try:
            self._ready()
            ids, self._later = split(buffers.ids, buffers.weights, self.protected, self._on_gpu)
            deferred = None if earlier is None else earlier.output.result()
            if deferred is None:
                self._layer.forward(buffers.x, ids, buffers.weights, out=buffers.y)
            else:
                y = self._layer.forward(_widened(buffers.x), ids, buffers.weights)
                y += _widened(deferred)
                buffers.y[...] = y.astype(BF16).view(np.uint16)
        finally:
            if earlier is not None:
                earlier.release()

    def late(self) -> np.ndarray | None:
        """The deferred experts, or None if there are none. Runs after now()."""
        if self._later is None:
            return None
        buffers = self._buffers
        if buffers.late is None:
            buffers.late = np.empty_like(buffers.x)
        return self._layer.forward(buffers.x, self._later, buffers.weights, out=buffers.late)


def _widened(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits as float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Job:
    """What a caller waits for. Either result() or abandon() is called, once."""

    def __init__(self, buffers: Buffers, dtype, output: Future):
        self._buffers = buffers
        self._dtype = dtype
        self._output = output

    def result(self, stream):
        try:
            self._output.result()
            return self._buffers.key.side.hand_back(self._buffers, self._dtype, stream)
        finally:
            self._buffers.release()

    def abandon(self) -> None:
        self._output.add_done_callback(lambda _: self._buffers.release())
