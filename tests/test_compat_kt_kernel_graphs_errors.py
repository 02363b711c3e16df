"""KTMoEWrapper in CUDA graphs that fail or go: closed layers, errors of CUDA, memory that is given back, forks.

On a stand-in for torch and CUDA (fake_cuda/), which says where something was used after it was freed.
"""

import gc
import threading

import numpy as np
import pytest
from helpers import in_child, same_bits
from kt_graphs import Captured, on_device, stack, value
from kt_wrappers import batch, eventually, wrapper

from ktmoe import backends
from ktmoe.compat import cuda_runtime
from ktmoe.compat.engine import ENGINE
from ktmoe.compat.kt_kernel import KTMoEWrapper
from ktmoe.errors import ClosedError, OutOfMemoryError, UnavailableError

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture
def torch(fake_torch):
    return fake_torch


@pytest.fixture
def nothing_is_pinned(torch):
    """The next call of any wrapper gives back the memory of graphs that are gone."""
    before = torch.runtime.pinned()
    yield
    gc.collect()
    KTMoEWrapper.clear_buffer_cache()
    assert eventually(lambda: (ENGINE.captures.settle(), torch.runtime.pinned() == before)[1])


def is_nan(y) -> bool:
    return bool(np.isnan(value(y).astype(np.float32)).all())


# Replays that fail


def test_a_layer_that_was_closed(torch, folder, nothing_is_pinned):
    """What it gives is NaN; any wrapper's next call says why, once; the other layers of the graph go on."""
    first, second, other = *stack(folder, (0, 0)), wrapper(folder, 2)
    pinned = torch.runtime.pinned()
    captured = Captured(torch, [first, second], [batch(0), batch(1)])
    first.close()
    for _ in range(2):
        captured.graph.replay()
        assert is_nan(captured.outputs[0])
        with pytest.raises(ClosedError, match=r"^layer 0: .*CUDA graph.*NaN") as kept:
            other.forward(*batch())
        assert same_bits(value(captured.outputs[1]), second.forward(*batch(1)))
    del captured
    assert eventually(lambda: (other.forward(*batch()), torch.runtime.pinned() <= pinned)[1])
    assert kept.value.__traceback__  # the error does not keep the graph's memory
    second.close()
    other.close()


def test_several_layers_that_were_closed(torch, folder):
    """One error says how many there are."""
    *closed, other = stack(folder, (0, 0, 0))
    captured = Captured(torch, closed, [batch(0), batch(1)])
    for w in closed:
        w.close()
    captured.graph.replay()
    torch.cuda.synchronize()
    with pytest.raises(ClosedError, match="layer 0: ") as caught:
        other.forward(*batch())
    assert caught.value.__notes__ == ["calls that failed: 2"]
    other.forward(*batch())
    other.close()


@pytest.mark.parametrize("call", ["submit_forward", "sync_forward", "forward", "load_weights"])
def test_each_call_says_it(torch, folder, call):
    w, closed = wrapper(folder), wrapper(folder, 1)
    captured = Captured(torch, [closed], [batch()])
    closed.close()
    if call == "sync_forward":
        w.submit_forward(*batch())
    captured.graph.replay()
    torch.cuda.synchronize()
    arguments = {"sync_forward": (), "load_weights": ()}.get(call, batch())
    with pytest.raises(ClosedError, match="layer 1: "):
        getattr(w, call)(*arguments)
    result = getattr(w, call)(*arguments)
    if call.endswith("forward"):
        y = result if result is not None else w.sync_forward()
        assert same_bits(y, w.forward(*batch()))
    w.close()


def test_weights_that_were_loaded_again(torch, folder):
    """The graph was captured with the weights before: it does not compute with others silently."""
    with wrapper(folder) as w:
        captured = Captured(torch, [w], [batch()])
        w.load_weights()
        captured.graph.replay()
        assert is_nan(captured.outputs[0])
        with pytest.raises(ClosedError, match=r"layer 0: .*loaded again"):
            w.forward(*batch())
        again = Captured(torch, [w], [batch()])
        assert same_bits(again.run([batch(3)])[0], w.forward(*batch(3)))


def test_deferred_experts_of_a_layer_that_was_closed(torch, folder):
    """The next layer's result lacks them: it is NaN as well."""
    wrappers = stack(folder, (2, 2, 0))
    captured = Captured(torch, wrappers, [batch(index, 2) for index in range(3)])
    expected = [w.forward(*batch(index, 2)) for index, w in enumerate(wrappers)]
    wrappers[0].close()
    captured.graph.replay()
    assert [is_nan(y) for y in captured.outputs] == [True, True, False]
    assert same_bits(value(captured.outputs[2]), expected[2])  # what the second layer deferred was right
    with pytest.raises(ClosedError, match="layer 0: "):
        wrappers[1].forward(*batch())
    wrappers[1].close()
    wrappers[2].close()


def test_a_wrapper_that_is_gone(torch, folder, nothing_is_pinned):
    """The graph keeps its weights, and gives them back with itself."""
    w = wrapper(folder)
    expected = w.forward(*batch(3))
    captured = Captured(torch, [w], [batch()])
    captured.wrappers.clear()
    del w
    gc.collect()
    assert same_bits(captured.run([batch(3)])[0], expected)


# Captures that fail

FUNCTIONS = [
    ("cudaLaunchHostFunc", 0),
    ("cudaLaunchHostFunc", 1),
    ("cudaStreamGetCaptureInfo_v3", 0),
    ("cudaUserObjectCreate", 0),
    ("cudaGraphRetainUserObject", 0),
    ("cudaThreadExchangeStreamCaptureMode", 0),
    ("cudaHostAlloc", 0),
]


@pytest.mark.parametrize(("name", "skip"), FUNCTIONS)
@pytest.mark.parametrize("error", [2, 801])
def test_an_error_of_cuda(torch, folder, name, skip, error, nothing_is_pinned):
    """It is raised in CUDA's words, and torch does not find it as an error of its own; then all works again."""
    with wrapper(folder) as w:
        tensors, graph = on_device(torch, batch()), torch.cuda.CUDAGraph()
        torch.runtime.last_error()
        torch.runtime.fail(name, error, skip)
        kind, words = (OutOfMemoryError, "out of memory") if error == 2 else (UnavailableError, "unrecognized error code")
        with pytest.raises(kind, match=f"{name}.*{words}"), torch.cuda.graph(graph):
            w.forward(*tensors, torch.cuda.current_stream())
        assert torch.runtime.last_error() == 0
        assert same_bits(w.forward(*batch()), w.forward(*batch()))
        captured = Captured(torch, [w], [batch()])
        assert same_bits(captured.run([batch(3)])[0], w.forward(*batch(3)))


def test_a_capture_that_fails_half_way(torch, folder, nothing_is_pinned):
    """By somebody else's error, or since something broke it."""
    wrappers = stack(folder, (2, 2, 0))

    def fails(how):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            wrappers[0].forward(*tensors, torch.cuda.current_stream())
            wrappers[1].submit_forward(*tensors, torch.cuda.current_stream())
            how()

    tensors = on_device(torch, batch(0, 2))
    for how, error in ((lambda: 1 // 0, ZeroDivisionError), (torch.cuda.synchronize, RuntimeError)):
        with pytest.raises(error):
            fails(how)
        cases = [batch(index, 2) for index in range(3)]
        captured = Captured(torch, wrappers, cases)
        expected = [w.forward(*case).copy() for w, case in zip(wrappers, cases, strict=True)]
        assert all(same_bits(*pair) for pair in zip(captured.run(cases), expected, strict=True))
    for w in wrappers:
        w.close()


def test_a_capture_that_was_broken_before(torch, folder):
    tensors = on_device(torch, batch())
    with wrapper(folder) as w:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            graph.capture_begin()
            assert torch.runtime.error_of("cudaStreamSynchronize", stream.cuda_stream) == 900
            with pytest.raises((UnavailableError, RuntimeError)):
                w.forward(*tensors, stream)
            with pytest.raises(RuntimeError, match="previous error during capture"):
                graph.capture_end()
        assert same_bits(value(w.forward(*tensors, 0)), w.forward(*batch()))


def test_no_runtime(torch, folder, monkeypatch):
    monkeypatch.setattr(cuda_runtime, "loaded", list)
    tensors = on_device(torch, batch())
    with wrapper(folder) as w:
        with (
            pytest.raises(UnavailableError, match=r"has not loaded CUDA.s runtime, libcudart\.so"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            w.forward(*tensors, torch.cuda.current_stream())
        assert same_bits(value(w.forward(*tensors, 0)), w.forward(*batch()))  # outside of graphs nothing is needed


def test_a_backend_that_is_not_native(torch, folder, monkeypatch):
    """Such as a plug-in's, which computes in Python."""

    class Packed:
        def __getattr__(self, name):
            return getattr(self.packed, name)

    with wrapper(folder) as w:
        foreign = Packed()
        foreign.packed = w.moe.packed
        with monkeypatch.context() as patch:
            patch.setattr(w.moe, "packed", foreign)
            with pytest.raises(UnavailableError, match=f"layer 0: backend '{w.moe.backend}'"):
                Captured(torch, [w], [batch()])
        assert w.moe.backend in backends.names()


# Graphs that go


def test_a_graph_that_is_gone(torch, folder, nothing_is_pinned):
    """Also while it runs, and with its deferred experts not yet taken."""
    wrappers = stack(folder, (2, 2, 0))
    pinned = torch.runtime.pinned()
    for turn in range(3):
        captured = Captured(torch, wrappers[: 3 - turn], [batch(index, 2) for index in range(3 - turn)])
        assert torch.runtime.pinned() > pinned
        stream = torch.cuda.Stream()
        with torch.held(stream), torch.cuda.stream(stream):
            captured.graph.replay()
            captured.graph.reset()
        assert eventually(lambda: (wrappers[2].forward(*batch()), torch.runtime.pinned() == pinned)[1])
    for w in wrappers:
        w.close()


def test_graphs_are_captured_and_destroyed_by_several_threads(torch, folder, nothing_is_pinned):
    """One at a time is captured, as torch has it; meanwhile others are launched, destroyed and given back."""
    wrappers, wrong, one = stack(folder, (0, 0)), [], threading.Lock()
    expected = [w.forward(*batch(7, 2)).copy() for w in wrappers]

    def life():
        stream = torch.cuda.Stream()
        for _ in range(6):
            with torch.cuda.stream(stream):
                with one:
                    captured = Captured(torch, wrappers, [batch(7, 2)] * 2, capture_error_mode="thread_local")
                captured.graph.replay()
                stream.synchronize()
                found = [y.array.view(expected[0].dtype) for y in captured.outputs]
                wrong.extend(not same_bits(*pair) for pair in zip(found, expected, strict=True))
                captured.graph.reset()

    threads = [threading.Thread(target=life) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [False] * 24
    for w in wrappers:
        w.close()


# Forks


def test_fork(torch, folder):
    """While a replay runs: the child has no graphs, and computes; the parent goes on."""
    w = wrapper(folder)
    captured, expected = Captured(torch, [w], [batch()]), w.forward(*batch())
    stream = torch.cuda.Stream()
    with torch.held(stream), torch.cuda.stream(stream):
        captured.graph.replay()
        assert in_child(lambda: same_bits(w.forward(*batch()), expected))
    assert same_bits(value(captured.outputs[0]), expected)
    assert same_bits(captured.run([batch(3)])[0], w.forward(*batch(3)))
    w.close()
