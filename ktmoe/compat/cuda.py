"""torch CUDA tensors: pinned host memory, copies on the caller's stream, and events that the worker waits for.

kt-kernel puts host functions into the stream (cudaLaunchHostFunc). torch has no such call, so here sync_forward() waits on the
host until the experts are done, and only copies in the stream; a CUDA graph cannot hold that, and capturing one raises.
"""

from __future__ import annotations

from ktmoe.compat.host import TorchHost
from ktmoe.errors import UnavailableError


class Cuda(TorchHost):
    """device: where the caller's tensors are."""

    pinned = True

    def __init__(self, device):
        self.device = device

    def bring(self, buffers, x, ids, weights, stream):
        cuda = self.torch.cuda
        with cuda.stream(self._stream(stream)):
            self._refuse_capture()
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
            self._refuse_capture()
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

    def _refuse_capture(self) -> None:
        if self.torch.cuda.is_current_stream_capturing():
            raise UnavailableError(
                "a CUDA graph is being captured: torch cannot put a host function into a stream, so experts on the CPU cannot "
                "be part of a graph; run these layers outside of it (SGLang: --disable-cuda-graph)"
            )
