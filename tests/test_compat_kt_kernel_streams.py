"""What KTMoEWrapper does with CUDA streams, on a stand-in for torch whose streams do nothing until somebody waits for them.

It shows the order of copies, events and tasks, also where there is no GPU. That torch itself takes these calls is for
test_compat_kt_kernel_torch.py, on a machine that has one.
"""

import sys
import types
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from helpers import BF16, same_bits
from kt_wrappers import EXPERTS, batch, wrapper

from ktmoe import MoELayer
from ktmoe.compat.engine import ENGINE
from ktmoe.compat.kt_kernel import KTMoEWrapper
from ktmoe.errors import UnavailableError

pytestmark = pytest.mark.usefixtures("nothing_is_left")

POISON = 0xFF


@dataclass(frozen=True)
class Dtype:
    name: str
    numpy: type


@dataclass(frozen=True)
class Device:
    type: str
    index: int = 0


class Tensor:
    """An array that says where it is. A copy that crosses is done when its stream gets there; until then memory is poisoned."""

    def __init__(self, torch, array, dtype, device, pinned=False):
        self.torch, self.array, self.dtype, self.device, self.pinned = torch, array, dtype, device, pinned

    @property
    def shape(self):
        return self.array.shape

    def _as(self, array):
        return Tensor(self.torch, array, self.dtype, self.device, self.pinned)

    def detach(self):
        return self

    def reshape(self, shape):
        return self._as(self.array.reshape(shape))

    def is_floating_point(self):
        return self.dtype in (self.torch.bfloat16, self.torch.float32)

    def view(self, dtype):
        return Tensor(self.torch, self.array.view(dtype.numpy), dtype, self.device, self.pinned)

    def numpy(self):
        assert self.device.type == "cpu"
        return self.array

    def sum(self):
        return self.array.sum()

    def copy_(self, source, non_blocking):
        assert non_blocking
        host = self if self.device.type == "cpu" else source
        assert host.pinned, "torch would wait for a copy from memory that is not pinned"
        self.array.view(np.uint8)[...] = POISON
        target, array = self.array, source.array
        self.torch.cuda.current_stream().queue.append(lambda: np.copyto(target, array))


class Stream:
    def __init__(self, handle):
        self.cuda_stream, self.queue, self.done = handle, [], 0

    def run(self, until):
        while self.done < until:
            self.done += 1
            self.queue[self.done - 1]()


def fake_torch():
    torch, cuda = types.ModuleType("torch"), types.SimpleNamespace()
    for name, numpy in (
        ("bfloat16", np.uint16),
        ("int16", np.int16),
        ("int64", np.int64),
        ("float32", np.float32),
        ("bool", bool),
    ):
        setattr(torch, name, Dtype(name, numpy))
    torch.Tensor = Tensor

    def empty(shape, dtype, pin_memory=False, *, device):
        array = np.empty(shape, dtype.numpy)
        array.view(np.uint8)[...] = POISON
        return Tensor(torch, array, dtype, Device(device) if isinstance(device, str) else device, pin_memory)

    torch.empty = empty
    torch.is_inference_mode_enabled = lambda: False
    torch.from_numpy = lambda array: array  # the mask, which only ever is on the host
    streams = {0: Stream(0)}
    current = [streams[0]]

    @contextmanager
    def stream(given):
        current.append(given)
        yield
        current.pop()

    class Event:
        def record(self):
            self.stream, self.place = current[-1], len(current[-1].queue)

        def synchronize(self):
            self.stream.run(self.place)

    def external(handle, device):
        assert handle != 0, "torch makes a new stream of the handle 0"
        return streams.setdefault(handle, Stream(handle))

    cuda.stream, cuda.Event, cuda.ExternalStream = stream, Event, external
    cuda.default_stream = lambda device: streams[0]
    cuda.current_stream = lambda device=None: current[-1]
    cuda.is_current_stream_capturing = lambda: getattr(current[-1], "capturing", False)
    torch.cuda, torch.streams = cuda, streams
    return torch


@pytest.fixture
def torch(monkeypatch):
    made = fake_torch()
    monkeypatch.setitem(sys.modules, "torch", made)
    return made


@pytest.fixture(scope="module")
def layer(folder):
    with MoELayer.from_checkpoint(folder, 0) as made:
        yield made


def on_device(torch, case):
    dtypes = torch.bfloat16, torch.int64, torch.float32
    arrays = case[0].view(np.uint16), case[1], case[2]
    return [Tensor(torch, array.copy(), dtype, Device("cuda")) for array, dtype in zip(arrays, dtypes, strict=True)]


def value(y):
    """After the streams have got as far as they were filled."""
    for stream in y.torch.streams.values():
        stream.run(len(stream.queue))
    return y.array.view(BF16)


@pytest.mark.parametrize("stream", [None, 0, 7, "object"])
def test_copies_are_in_the_callers_stream(torch, folder, layer, stream):
    case, given = batch(), stream
    if stream == "object":
        given = torch.streams[9] = Stream(9)
    with wrapper(folder) as w:
        w.submit_forward(*on_device(torch, case), given)
        y = w.sync_forward(None, given)
    assert (y.device.type, y.dtype) == ("cuda", torch.bfloat16)
    assert (y.array.view(np.uint8) == POISON).all()  # nothing waited for the copy back
    used = {handle: len(s.queue) for handle, s in torch.streams.items() if s.queue}
    assert used == {{None: 0, "object": 9}.get(stream, stream): 4}
    assert same_bits(value(y), layer.forward(*case))


def test_what_is_copied_is_what_the_stream_has_by_then(torch, folder, layer):
    """Work that was in the stream before submit_forward() counts, and what comes after it does not."""
    case = batch()
    x, ids, scores = on_device(torch, case)
    torch.streams[0].queue.append(lambda: _set(x, np.negative(case[0])))
    with wrapper(folder) as w:
        w.submit_forward(x, ids, scores, 0)
        torch.streams[0].queue.append(lambda: _set(x, np.zeros_like(case[0])))
        y = w.sync_forward(None, 0)
    assert same_bits(value(y), layer.forward(np.negative(case[0]), *case[1:]))


def _set(tensor, array):
    tensor.array[...] = array.view(np.uint16)


@pytest.mark.parametrize("captured", [[], [5]])
def test_a_result_is_not_overwritten_before_it_is_copied(torch, folder, layer, captured):
    """Calls of one slot on two streams, of which the first gets to its copy last."""
    KTMoEWrapper.set_capture_batch_sizes(captured)
    cases = [batch(seed) for seed in range(6)]
    with wrapper(folder) as w:
        results = []
        for turn, case in enumerate(cases):
            w.submit_forward(*on_device(torch, case), 1 + turn % 2)
            y = w.sync_forward(None, 1 + turn % 2)
            if captured:
                assert same_bits(value(y).copy(), layer.forward(*case))
            results.append(y)
        if captured:
            assert len({id(y) for y in results}) == 1
        else:
            for y, case in zip(results, cases, strict=True):
                assert same_bits(value(y), layer.forward(*case))
    assert len(ENGINE.pool.kept) == len(captured)  # one slot's were enough all the time


def test_deferral(torch, folder):
    """As on the host."""
    host = [wrapper(folder, index, max_deferred_experts_per_token=d) for index, d in enumerate((2, 2, 0))]
    expected = [w.forward(*batch(index, 2)) for index, w in enumerate(host)]
    for index, w in enumerate(host):
        w.submit_forward(*on_device(torch, batch(index, 2)), 3)
        assert same_bits(value(w.sync_forward(None, 3)), expected[index])
        w.close()


def test_capturing_a_graph_is_refused(torch, folder, layer):
    torch.streams[5] = Stream(5)
    torch.streams[5].capturing = True
    case = batch()
    with wrapper(folder) as w:
        for _ in range(2):
            with pytest.raises(UnavailableError, match=r"a CUDA graph is being captured: .*--disable-cuda-graph"):
                w.submit_forward(*on_device(torch, case), 5)
        w.submit_forward(*on_device(torch, case), 0)
        with pytest.raises(UnavailableError, match="a CUDA graph is being captured"):
            w.sync_forward(None, 5)
        w.submit_forward(*on_device(torch, case), 0)
        assert same_bits(value(w.sync_forward(None, 0)), layer.forward(*case))


def test_the_mask_counts_at_submission(torch, folder, layer):
    case = batch()
    with wrapper(folder) as w:
        w.gpu_experts_mask[:3] = True
        w.submit_forward(*on_device(torch, case), 0)
        w.gpu_experts_mask[:] = True
        y = w.sync_forward(None, 0)
    assert EXPERTS > 3
    assert same_bits(value(y), layer.forward(case[0], np.where(case[1] < 3, -1, case[1]), case[2]))
