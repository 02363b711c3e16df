"""What ktmoe and these tests need of torch, on the stand-in's runtime."""

from __future__ import annotations

import ctypes
import gc
import threading
import types
from contextlib import contextmanager

import numpy as np

from . import runtime as kernels
from . import tensors
from .runtime import Runtime
from .tensors import Device, Dtype, Tensor

MODES = ("global", "thread_local", "relaxed")


class Torch(types.ModuleType):
    """A module `torch`; runtime: what it runs on."""

    bfloat16, int16, int32, int64 = tensors.bfloat16, tensors.int16, tensors.int32, tensors.int64
    float32, bool, Tensor = tensors.float32, tensors.bool_, Tensor
    is_inference_mode_enabled = staticmethod(lambda: False)

    def __init__(self, runtime: Runtime):
        super().__init__("torch")
        self.runtime = runtime
        self.version = types.SimpleNamespace(cuda="12.9")
        self.cuda = Cuda(self)

    def empty(self, shape, *, dtype: Dtype, device="cpu", pin_memory: bool = False) -> Tensor:
        """Poisoned. What is made on the device while a graph is captured belongs to the graph's pool."""
        device = Device(device) if isinstance(device, str) else device
        size = int(np.prod(shape)) * np.dtype(dtype.numpy).itemsize
        memory = self.runtime.memory(size, pin_memory)
        if device.type == "cuda" and self.cuda.capturing is not None:
            self.cuda.capturing.pool.append(memory)
        array = np.frombuffer(memory, np.uint8, size).view(dtype.numpy).reshape(shape)
        return Tensor(self, array, dtype, device, pin_memory)

    def empty_like(self, tensor: Tensor) -> Tensor:
        return self.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    def from_numpy(self, array):
        if array.dtype == np.bool_:
            return array  # the mask, which only ever is on the host
        dtype = {np.int16: self.int16, np.int64: self.int64, np.float32: self.float32}[array.dtype.type]
        return Tensor(self, array, dtype, Device("cpu"), pinned=True)  # a copy finds out whether it is

    def on_device(self, array: np.ndarray, dtype: Dtype | None = None) -> Tensor:
        """A new tensor with an array's numbers; uint16 and what has as many bits is bfloat16."""
        if dtype is None:
            dtype = {2: self.bfloat16, 4: self.float32, 8: self.int64}[array.itemsize]
        made = self.empty(array.shape, dtype=dtype, device=Device("cuda", 0))
        made.set_(array)
        return made

    def launch(self, kernel: int, target: Tensor, *sources: Tensor) -> Tensor:
        """Put a kernel into the current stream."""
        addresses = [source.array.ctypes.data for source in sources] + [0]
        self._kernel(self.cuda.current_stream(), kernel, target.array.ctypes.data, *addresses[:2], target.array.nbytes)
        return target

    def _kernel(self, stream: Stream, kernel: int, *arguments: int) -> None:
        self.runtime.call("fakeKernel", stream.cuda_stream, ctypes.c_int(kernel), *arguments)

    def delay(self, stream: Stream, milliseconds: int) -> None:
        """What is put into a stream from now on comes so much later."""
        self._kernel(stream, kernels.DELAY, 0, 0, 0, 1000 * milliseconds)

    @contextmanager
    def held(self, stream: Stream):
        """Nothing that is put into a stream meanwhile runs before the end of this."""
        flag = np.zeros(1, np.uint8)
        self._kernel(stream, kernels.GATE, 0, flag.ctypes.data, 0, 0)
        try:
            yield
        finally:
            flag[0] = 1
            stream.synchronize()


class Cuda:
    """torch.cuda. capturing: the graph that is being captured."""

    def __init__(self, torch: Torch):
        self.torch, self.capturing = torch, None
        self._default = Stream(torch, 0)
        self._local = threading.local()
        self.Stream = lambda: Stream(torch, torch.runtime.made("cudaStreamCreateWithFlags", 1))
        self.Event = lambda: Event(torch)
        self.CUDAGraph = lambda: Graph(torch)

    @contextmanager
    def stream(self, given: Stream):
        before = self.current_stream()
        self._local.stream = given
        try:
            yield
        finally:
            self._local.stream = before

    def current_stream(self, device=None) -> Stream:
        return getattr(self._local, "stream", self._default)

    def default_stream(self, device=None) -> Stream:
        return self._default

    def ExternalStream(self, handle: int, device=None) -> Stream:
        assert handle != 0, "torch makes a new stream of the handle 0"
        return Stream(self.torch, handle)

    def is_current_stream_capturing(self) -> bool:
        status = ctypes.c_int()
        self.torch.runtime.call("cudaStreamIsCapturing", self.current_stream().cuda_stream, ctypes.byref(status))
        return status.value != 0

    def synchronize(self) -> None:
        self.torch.runtime.call("cudaDeviceSynchronize")

    @contextmanager
    def graph(self, graph: Graph, stream: Stream | None = None, capture_error_mode: str = "global"):
        """Capture as torch does: in a stream of its own; where capturing failed, its error comes after the caller's."""
        self.synchronize()
        gc.collect()
        with self.stream(stream or self.Stream()):
            graph.capture_begin(capture_error_mode)
            try:
                yield
            finally:
                graph.capture_end()


class Stream:
    def __init__(self, torch: Torch, handle: int):
        self.torch, self.cuda_stream = torch, handle

    def synchronize(self) -> None:
        self.torch.runtime.call("cudaStreamSynchronize", self.cuda_stream)

    def wait_stream(self, other: Stream) -> None:
        with self.torch.cuda.stream(other):
            event = Event(self.torch)
            event.record()
        self.torch.runtime.call("cudaStreamWaitEvent", self.cuda_stream, event.handle, 0)


class Event:
    def __init__(self, torch: Torch):
        self.torch, self.handle = torch, torch.runtime.made("cudaEventCreateWithFlags", 2)

    def record(self) -> None:
        self.torch.runtime.call("cudaEventRecord", self.handle, self.torch.cuda.current_stream().cuda_stream)

    def synchronize(self) -> None:
        self.torch.runtime.call("cudaEventSynchronize", self.handle)

    def __del__(self):
        self.torch.runtime.error_of("cudaEventDestroy", self.handle)


class Graph:
    """torch.cuda.CUDAGraph. pool: memory of the device that its nodes may work on."""

    def __init__(self, torch: Torch):
        self.torch, self.pool, self._stream, self._executable = torch, [], None, None

    def capture_begin(self, capture_error_mode: str = "global") -> None:
        self._stream = self.torch.cuda.current_stream().cuda_stream
        mode = ctypes.c_int(MODES.index(capture_error_mode))
        self.torch.runtime.call("cudaStreamBeginCapture", self._stream, mode)
        self.torch.cuda.capturing = self

    def capture_end(self) -> None:
        """The graph itself goes at once, and what can be launched stays."""
        runtime, graph = self.torch.runtime, ctypes.c_void_p()
        self.torch.cuda.capturing = None
        runtime.call("cudaStreamEndCapture", self._stream, ctypes.byref(graph))
        self._executable = runtime.made("cudaGraphInstantiateWithFlags", graph, 1)
        runtime.call("cudaGraphDestroy", graph)

    def replay(self) -> None:
        self.torch.runtime.call("cudaGraphLaunch", self._executable, self.torch.cuda.current_stream().cuda_stream)

    def reset(self) -> None:
        executable, self._executable = self._executable, None
        if executable is not None:
            self.torch.runtime.error_of("cudaGraphExecDestroy", executable)
        self.pool.clear()

    __del__ = reset
