"""torch CUDA tensors: pinned host memory, copies on the caller's stream, and events that the worker waits for.

kt-kernel puts host functions into the stream. Here sync_forward() waits on the host until the experts are done, and only copies
in the stream: then an error can be raised. While a CUDA graph is captured, host functions are in the stream (captures.py).
"""

from __future__ import annotations

import functools

import numpy as np

from ktmoe.compat import cuda_runtime
from ktmoe.compat.captures import CapturingStream
from ktmoe.compat.host import TorchHost
from ktmoe.errors import InputError, UnavailableError


class Cuda(TorchHost):
    """device: where the caller's tensors are."""

    pinned = True

    def __init__(self, device):
        self.device = device

    def bring(self, buffers, x, ids, weights, stream):
        cuda = self.torch.cuda
        with cuda.stream(self._stream(stream)):
            if cuda.is_current_stream_capturing():
                raise UnavailableError("CUDA graphs: a call of this kind cannot be captured, only those for inference can")
            self.copy(buffers, x, ids, weights)
            arrived = cuda.Event()
            arrived.record()
        returned = buffers.kept.get("returned")

        def ready(_alive=(x, ids, weights)):  # until they are copied
            arrived.synchronize()
            if returned is not None:  # the copy of what was in y, which may have been on another stream
                returned.synchronize()

        return ready

    def hand_back(self, buffers, dtype, stream):
        torch, kept = self.torch, buffers.kept
        with torch.cuda.stream(self._stream(stream)):
            if torch.cuda.is_current_stream_capturing():
                raise InputError(
                    "sync_forward is captured in a CUDA graph, and its submit_forward was not: both must be in the same graph"
                )
            y = kept.get("y") if buffers.captured else None
            if y is None or y.dtype != dtype:
                y = torch.empty(buffers.y.shape, dtype=dtype, device=self.device)
                if buffers.captured:
                    kept["y"] = y
            y.copy_(buffers.y_owner, non_blocking=True)
            kept["returned"] = torch.cuda.Event()
            kept["returned"].record()
        return y

    def _stream(self, stream):
        """A torch stream from one, from a handle, or from nothing: the current one."""
        cuda = self.torch.cuda
        if stream is None:
            return cuda.current_stream(self.device)
        if isinstance(stream, int):  # torch takes the handle 0 for none and would make a new stream
            return cuda.ExternalStream(stream, device=self.device) if stream else cuda.default_stream(self.device)
        return stream

    def capturing(self, stream) -> CapturingStream | None:
        """Where a call on this stream is captured; None if it is not. Raises UnavailableError if it cannot be."""
        stream, cuda = self._stream(stream), self.torch.cuda
        with cuda.stream(stream):
            if not cuda.is_current_stream_capturing():
                return None
            runtime, handle = cuda_runtime.find(), stream.cuda_stream
            graph = runtime.capturing(handle)
        if graph is None:
            raise UnavailableError("CUDA graphs: the capture on this stream has failed before, and cannot go on")
        return CapturingStream(runtime, handle, graph, functools.partial(cuda.stream, stream))

    def adopted(self, array: np.ndarray):
        """A tensor on a captured call's memory."""
        torch = self.torch
        if torch.is_inference_mode_enabled():  # as in allocate()
            with torch.inference_mode(False):
                return self.adopted(array)
        if array.dtype == np.uint16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    def returned(self, buffers, dtype):
        """Capture the copy of a call's result in the current stream, to memory that is the graph's."""
        y = self.torch.empty(buffers.y.shape, dtype=buffers.y_owner.dtype, device=self.device)
        y.copy_(buffers.y_owner, non_blocking=True)
        return y.to(dtype)  # there: a copy that converts may do so on the host, and no replay would
