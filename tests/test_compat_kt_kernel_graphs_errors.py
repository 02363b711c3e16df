"""KTMoEWrapper in CUDA graphs that fail or go: closed layers, errors of CUDA, memory that is given back, forks.

On a stand-in for torch and CUDA (fake_cuda/), which says where something was used after it was freed.
"""

import gc
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import in_child, same_bits
from kt_graphs import Captured, assert_same, cases_of, close, eager, on_device, stack, value
from kt_wrappers import batch, eventually, wrapper

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


def test_layers_that_were_closed(torch, folder, nothing_is_pinned):
    """What they give is NaN; any wrapper's next call says why, once, and for how many; the other layers of the graph go on."""
    first, second, third = stack(folder, (0, 0, 0))
    pinned = torch.runtime.pinned()
    captured = Captured(torch, [first, second, third], [batch(0), batch(1), batch(2)])
    first.close()
    third.close()
    for _ in range(2):
        captured.graph.replay()
        assert [is_nan(y) for y in captured.outputs] == [True, False, True]
        with pytest.raises(ClosedError, match=r"^layer 0: .*CUDA graph.*NaN") as kept:
            second.forward(*batch(1))
        assert kept.value.__notes__ == ["calls that failed: 2"]
        assert same_bits(value(captured.outputs[1]), second.forward(*batch(1)))
    del captured
    assert eventually(lambda: (second.forward(*batch()), torch.runtime.pinned() <= pinned)[1])
    assert kept.value.__traceback__  # the error does not keep the graph's memory
    second.close()


@pytest.mark.parametrize("call", ["submit_forward", "sync_forward", "load_weights"])
def test_each_call_says_it(torch, folder, call):
    w, closed = wrapper(folder), wrapper(folder, 1)
    captured = Captured(torch, [closed], [batch()])
    closed.close()
    if call == "sync_forward":
        w.submit_forward(*batch())
    captured.graph.replay()
    torch.cuda.synchronize()
    arguments = batch() if call == "submit_forward" else ()
    with pytest.raises(ClosedError, match="layer 1: "):
        getattr(w, call)(*arguments)
    getattr(w, call)(*arguments)
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
    ("cudaLaunchHostFunc", 0, 801),
    ("cudaLaunchHostFunc", 1, 801),
    ("cudaStreamGetCaptureInfo_v3", 0, 801),
    ("cudaUserObjectCreate", 0, 801),
    ("cudaGraphRetainUserObject", 0, 801),
    ("cudaThreadExchangeStreamCaptureMode", 0, 801),
    ("cudaHostAlloc", 0, 2),
]


@pytest.mark.parametrize(("name", "skip", "error"), FUNCTIONS)
def test_an_error_of_cuda(torch, folder, name, skip, error, nothing_is_pinned):
    """It is raised in CUDA's words, and torch does not find it as an error of its own; then all works again."""
    kind, words = (OutOfMemoryError, "out of memory") if error == 2 else (UnavailableError, "unrecognized error code")
    with wrapper(folder) as w:
        tensors = on_device(torch, batch())
        torch.runtime.last_error()
        torch.runtime.fail(name, error, skip)
        with pytest.raises(kind, match=f"{name}.*{words}"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            w.forward(*tensors)
        assert torch.runtime.last_error() == 0
        captured = Captured(torch, [w], [batch()])
        assert same_bits(captured.run([batch(3)])[0], w.forward(*batch(3)))


def test_a_capture_that_fails_half_way(torch, folder, nothing_is_pinned):
    """By somebody else's error, or since something broke it."""
    wrappers, cases = stack(folder, (2, 2, 0)), cases_of(0, 2)
    tensors = on_device(torch, cases[0])

    def fails(how):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            wrappers[0].forward(*tensors)
            wrappers[1].submit_forward(*tensors)
            how()

    for how, error in ((lambda: 1 // 0, ZeroDivisionError), (torch.cuda.synchronize, RuntimeError)):
        with pytest.raises(error):
            fails(how)
        captured = Captured(torch, wrappers, cases)
        assert_same(captured.run(cases), eager(wrappers, cases))
    close(wrappers)


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
    tensors, words = on_device(torch, batch()), r"has not loaded CUDA.s runtime, libcudart\.so"
    with wrapper(folder) as w:
        with pytest.raises(UnavailableError, match=words), torch.cuda.graph(torch.cuda.CUDAGraph()):
            w.forward(*tensors)
        assert same_bits(value(w.forward(*tensors, 0)), w.forward(*batch()))  # outside of graphs nothing is needed


def test_a_backend_that_is_not_native(torch, folder, monkeypatch):
    """Such as a plug-in's, which computes in Python."""
    with wrapper(folder) as w, monkeypatch.context() as patch:
        patch.setattr(w.moe, "packed", SimpleNamespace(close=w.moe.packed.close))
        with pytest.raises(UnavailableError, match=f"layer 0: backend '{w.moe.backend}'"):
            Captured(torch, [w], [batch()])


# Graphs that go


def test_a_graph_that_is_gone(torch, folder, nothing_is_pinned):
    """Also while it runs, and with its deferred experts not yet taken."""
    wrappers = stack(folder, (2, 2, 0))
    pinned = torch.runtime.pinned()
    for layers in (3, 2, 1):
        captured = Captured(torch, wrappers[:layers], cases_of(0, 2, layers))
        assert torch.runtime.pinned() > pinned
        stream = torch.cuda.Stream()
        with torch.held(stream), torch.cuda.stream(stream):
            captured.graph.replay()
            captured.graph.reset()
        assert eventually(lambda: (wrappers[2].forward(*batch()), torch.runtime.pinned() == pinned)[1])
    close(wrappers)


def test_graphs_are_captured_and_destroyed_by_several_threads(torch, folder, nothing_is_pinned):
    """One at a time is captured, as torch has it; meanwhile others are launched, destroyed and given back."""
    wrappers, wrong, one, cases = stack(folder, (0, 0)), [], threading.Lock(), [batch(7, 2)] * 2
    expected = eager(wrappers, cases)

    def life():
        stream = torch.cuda.Stream()
        for _ in range(6):
            with torch.cuda.stream(stream):
                with one:
                    captured = Captured(torch, wrappers, cases, capture_error_mode="thread_local")
                captured.graph.replay()
                wrong.append(not same_bits(wrappers[0].forward(*cases[0]), expected[0]))
                stream.synchronize()
                found = [y.array.view(expected[0].dtype) for y in captured.outputs]
                wrong.extend(not same_bits(*pair) for pair in zip(found, expected, strict=True))
                captured.graph.reset()

    threads = [threading.Thread(target=life) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [False] * 36
    close(wrappers)


# Forks


def test_fork(torch, folder):
    """While a replay runs: the child has no graphs, and computes; the parent goes on."""
    w = wrapper(folder)
    captured, expected = Captured(torch, [w], [batch()]), w.forward(*batch())
    stream = torch.cuda.Stream()
    with torch.held(stream), torch.cuda.stream(stream):
        captured.graph.replay()
        assert in_child(lambda: (dict(ENGINE.captures.live), same_bits(w.forward(*batch()), expected))) == ({}, True)
    assert same_bits(value(captured.outputs[0]), expected)
    assert same_bits(captured.run([batch(3)])[0], w.forward(*batch(3)))
    w.close()
