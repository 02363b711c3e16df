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
from .runtime import CudaError, Runtime
from .tensors import Device, Dtype, Tensor

MODES = {"global": kernels.GLOBAL, "thread_local": kernels.THREAD_LOCAL, "relaxed": kernels.RELAXED}


class Torch(types.ModuleType):
    """A module `torch`; runtime: what it runs on."""

    bfloat16, int16, int32, int64 = tensors.bfloat16, tensors.int16, tensors.int32, tensors.int64
    float32, bool = tensors.float32, tensors.bool_
    Tensor, AcceleratorError = Tensor, CudaError
    is_inference_mode_enabled = staticmethod(lambda: False)

    def __init__(self, runtime: Runtime):
        super().__init__("torch")
        self.runtime = runtime
        self.version = types.SimpleNamespace(cuda="12.9")
        self.cuda = Cuda(self)

    def empty(self, shape, *, dtype: Dtype, device=None, pin_memory: bool = False) -> Tensor:
        """Poisoned. What is made on the device while a graph is captured belongs to the graph's pool."""
        device = Device(device) if isinstance(device, str) else device or Device("cpu")
        size = int(np.prod(shape)) * np.dtype(dtype.numpy).itemsize
        memory = self.runtime.memory(size, pin_memory)
        if device.type == "cuda" and (graph := self.cuda.capturing.get(self.cuda.current_stream().cuda_stream)):
            graph.pool.append(memory)
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
        addresses = [source.data_ptr() for source in sources] + [0, 0]
        stream = self.cuda.current_stream().cuda_stream
        number, size = ctypes.c_int(kernel), target.array.nbytes
        self.runtime.call("fakeKernel", stream, number, target.data_ptr(), *addresses[:2], size)
        return target

    def delay(self, stream, milliseconds: int) -> None:
        """What is put into a stream from now on comes so much later."""
        number = ctypes.c_int(kernels.DELAY)
        self.runtime.call("fakeKernel", stream.cuda_stream, number, 0, 0, 0, 1000 * milliseconds)

    @contextmanager
    def held(self, stream):
        """Nothing that is put into a stream meanwhile runs before the end of this."""
        flag = np.zeros(1, np.uint8)
        number = ctypes.c_int(kernels.GATE)
        self.runtime.call("fakeKernel", stream.cuda_stream, number, 0, flag.ctypes.data, 0, 0)
        try:
            yield
        finally:
            flag[0] = 1
            self.runtime.call("cudaStreamSynchronize", stream.cuda_stream)


class Cuda:
    """torch.cuda. capturing: graphs by the stream in which their capture began."""

    def __init__(self, torch: Torch):
        self.torch, self.capturing = torch, {}
        self._default = Stream(torch, 0)
        self._local = threading.local()
        self.Stream = lambda device=None: Stream(torch, torch.runtime.made("cudaStreamCreateWithFlags", 1))
        self.Event = lambda: Event(torch)
        self.CUDAGraph = lambda: Graph(torch)

    is_available = staticmethod(lambda: True)
    current_device = staticmethod(lambda: 0)

    def _streams(self) -> list[Stream]:
        if not hasattr(self._local, "streams"):
            self._local.streams = [self._default]
        return self._local.streams

    @contextmanager
    def stream(self, given: Stream):
        streams = self._streams()
        streams.append(given)
        try:
            yield
        finally:
            streams.pop()

    @contextmanager
    def device(self, given):
        yield

    def current_stream(self, device=None) -> Stream:
        return self._streams()[-1]

    def default_stream(self, device=None) -> Stream:
        return self._default

    def ExternalStream(self, handle: int, device=None) -> Stream:
        assert handle != 0, "torch makes a new stream of the handle 0"
        return Stream(self.torch, handle)

    def is_current_stream_capturing(self) -> bool:
        return self.torch.runtime.capturing(self.current_stream().cuda_stream)

    def synchronize(self, device=None) -> None:
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

    device = Device("cuda", 0)

    def synchronize(self) -> None:
        self.torch.runtime.call("cudaStreamSynchronize", self.cuda_stream)

    def query(self) -> bool:
        return self.torch.runtime.over("cudaStreamQuery", self.cuda_stream)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        event = Event(self.torch)
        event.record(other)
        event.wait(self)


class Event:
    def __init__(self, torch: Torch):
        self.torch, self.handle = torch, torch.runtime.made("cudaEventCreateWithFlags", 2)

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.torch.cuda.current_stream()
        self.torch.runtime.call("cudaEventRecord", self.handle, stream.cuda_stream)

    def wait(self, stream: Stream | None = None) -> None:
        stream = stream or self.torch.cuda.current_stream()
        self.torch.runtime.call("cudaStreamWaitEvent", stream.cuda_stream, self.handle, 0)

    def synchronize(self) -> None:
        self.torch.runtime.call("cudaEventSynchronize", self.handle)

    def query(self) -> bool:
        return self.torch.runtime.over("cudaEventQuery", self.handle)

    def __del__(self):
        self.torch.runtime.error_of("cudaEventDestroy", self.handle)


class Graph:
    """torch.cuda.CUDAGraph. pool: memory of the device that its nodes may work on."""

    def __init__(self, torch: Torch):
        self.torch, self.pool, self._stream, self._executable = torch, [], None, None

    def capture_begin(self, capture_error_mode: str = "global") -> None:
        assert self._executable is None, "torch captures into a graph once"
        self._stream = self.torch.cuda.current_stream().cuda_stream
        mode = ctypes.c_int(MODES[capture_error_mode])
        self.torch.runtime.call("cudaStreamBeginCapture", self._stream, mode)
        self.torch.cuda.capturing[self._stream] = self

    def capture_end(self) -> None:
        """The graph itself goes at once, and what can be launched stays."""
        runtime, graph = self.torch.runtime, ctypes.c_void_p()
        del self.torch.cuda.capturing[self._stream]
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
