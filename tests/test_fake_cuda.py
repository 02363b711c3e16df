"""The stand-in for CUDA: what it runs, in which order, and that it sees what CUDA forbids. The rules are those of
cuda_runtime_api.h's comments."""

import ctypes
import gc
import itertools
import threading
import time

import numpy as np
import pytest
from fake_cuda import runtime as kernels
from fake_cuda.runtime import CudaError
from fake_cuda.tensors import Tensor
from helpers import in_child

HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
INTEGERS = np.arange(64, dtype=np.int64)


@pytest.fixture
def torch(fake_torch):
    return fake_torch


@pytest.fixture
def side(torch):
    """A stream that is the current one."""
    with torch.cuda.stream(torch.cuda.Stream()):
        yield torch.cuda.current_stream()


def host_function(torch, function):
    """Put a Python function into the current stream, as a host function; returns what must be kept."""
    kept = HOST_FUNCTION(lambda _: function())
    torch.runtime.call("cudaLaunchHostFunc", torch.cuda.current_stream().cuda_stream, kept, None)
    return kept


def waits_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


def copied(torch, tensor) -> Tensor:
    return torch.empty_like(tensor).copy_(tensor)


def test_a_stream_runs_in_order_and_others_do_not_wait(torch):
    numbers = torch.on_device(INTEGERS)
    torch.cuda.synchronize()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    event = torch.cuda.Event()
    with torch.held(first):
        with torch.cuda.stream(first):
            one = copied(torch, numbers)
            event.record()
        with torch.cuda.stream(second):
            other = copied(torch, numbers)
            assert np.array_equal(other.value(), INTEGERS)
            event.wait()
            third = copied(torch, one)
        assert not first.query()
        assert not event.query()
        assert not second.query()
        assert (one.array == -1).all()  # poison
    assert event.query()
    with torch.cuda.stream(second):
        assert np.array_equal(third.value(), INTEGERS)


def test_host_functions_share_one_thread(torch):
    seen, streams = [], [torch.cuda.Stream() for _ in range(3)]
    kept = []
    for stream in streams * 2:
        with torch.cuda.stream(stream):
            kept.append(host_function(torch, lambda: seen.append(threading.get_ident())))
    torch.cuda.synchronize()
    assert len(seen) == 6
    assert set(seen) not in ({threading.get_ident()}, set())
    assert len(set(seen)) == 1


def test_a_call_from_a_host_function_is_seen(torch, side):
    results = []
    kept = host_function(torch, lambda: results.append(torch.runtime.error_of("cudaMemcpyAsync", 0, 0, 0, 4, 0)))
    side.synchronize()
    assert kept
    assert results == [800]
    assert torch.runtime.violations() == "cudaMemcpyAsync: called by a host function or a destructor\n"


def test_a_graph_replays_what_was_captured(torch):
    x = torch.on_device(INTEGERS.astype(np.uint16))
    calls, graph = [], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        y = -x
        kept = host_function(torch, lambda: calls.append(y.array.copy()))
        z = -y
    assert kept
    assert not calls
    assert (z.array == 0xFFFF).all()
    for turn in range(3):
        x.set_(INTEGERS.astype(np.uint16) + turn)
        graph.replay()
        assert np.array_equal(z.value(), INTEGERS + turn)
        assert np.array_equal(calls[turn], z.array ^ 0x8000)


def test_nodes_that_do_not_depend_on_each_other_run_in_any_order(torch):
    """And the others in theirs."""
    orders, calls, kept, graph = set(), [], [], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main, fork = torch.cuda.current_stream(), torch.cuda.Stream()
        kept.append(host_function(torch, lambda: calls.append("begin")))
        fork.wait_stream(main)
        for stream, name in ((main, "a"), (fork, "b"), (main, "c")):
            with torch.cuda.stream(stream):
                kept.append(host_function(torch, lambda name=name: calls.append(name)))
        main.wait_stream(fork)
        kept.append(host_function(torch, lambda: calls.append("end")))
    for seed in range(40):
        torch.runtime.seed(seed)
        calls.clear()
        graph.replay()
        torch.cuda.synchronize()
        orders.add("".join(calls))
    assert orders == {f"begin{middle}end" for middle in ("abc", "bac", "acb")}


def test_launches_of_one_graph_come_one_after_the_other(torch):
    """Also in several streams."""
    calls, graph = [], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [host_function(torch, lambda: calls.append(1)), host_function(torch, lambda: calls.append(2))]
    for stream in itertools.islice(itertools.cycle([torch.cuda.Stream(), torch.cuda.Stream()]), 20):
        with torch.cuda.stream(stream):
            graph.replay()
    torch.cuda.synchronize()
    assert kept
    assert calls == [1, 2] * 20


def captured(torch, function, **how):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **how):
        function()
    return graph


FORBIDDEN = {
    "cudaHostAlloc": lambda torch: torch.empty((1,), dtype=torch.int64, pin_memory=True),
    "cudaMalloc": lambda torch: torch.runtime.made("cudaMalloc", 64),
    "another stream": lambda torch: torch.cuda.default_stream().synchronize(),
    "an event": lambda torch: torch.cuda.Event().query(),
}
CONFLICTS = {
    "this stream": lambda torch: torch.cuda.current_stream().synchronize(),
    "the device": lambda torch: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("what", [*FORBIDDEN, *CONFLICTS])
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_what_a_capture_forbids(torch, what, mode):
    if what in FORBIDDEN and mode == "relaxed":
        captured(torch, lambda: FORBIDDEN[what](torch), capture_error_mode=mode)
        return
    with pytest.raises(CudaError, match="previous error during capture") as caught:
        captured(torch, lambda: (FORBIDDEN | CONFLICTS)[what](torch), capture_error_mode=mode)
    assert "not permitted when stream is capturing" in str(caught.value.__context__)
    torch.cuda.synchronize()


@pytest.mark.parametrize(("mode", "forbidden"), [("global", True), ("thread_local", False), ("relaxed", False)])
def test_what_a_capture_forbids_other_threads(torch, mode, forbidden):
    errors = []

    def other():
        errors.append(torch.runtime.error_of("cudaEventQuery", event.handle))  # by which NCCL's watchdog breaks captures

    event, graph = torch.cuda.Event(), torch.cuda.CUDAGraph()
    thread = threading.Thread(target=other)
    try:
        with torch.cuda.graph(graph, capture_error_mode=mode):
            thread.start()
            thread.join()
    except CudaError:
        assert forbidden
    assert errors == [900 if forbidden else 0]


def test_the_thread_may_relax_it(torch):
    mode, graph = ctypes.c_int(kernels.RELAXED), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.runtime.call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        assert mode.value == kernels.GLOBAL
        torch.empty((1,), dtype=torch.int64, pin_memory=True)
        torch.runtime.call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        assert mode.value == kernels.RELAXED


def test_events_do_not_cross_a_capture(torch):
    inside, before = torch.cuda.Event(), torch.cuda.Event()
    before.record()
    with pytest.raises(CudaError, match="previous error") as caught:
        captured(torch, before.wait)
    assert "uncaptured work in another stream" in str(caught.value.__context__)
    captured(torch, inside.record)
    with pytest.raises(CudaError, match="an event last recorded in a capturing stream"):
        inside.query()


def test_work_that_was_not_joined(torch):
    fork, x = torch.cuda.Stream(), torch.on_device(INTEGERS)

    def function():
        fork.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(fork):
            copied(torch, x)

    with pytest.raises(CudaError, match="unjoined"):
        captured(torch, function)
    assert not torch.runtime.capturing(fork.cuda_stream)


def user_object(torch, function) -> tuple:
    destroy = HOST_FUNCTION(lambda _: function())
    return torch.runtime.made("cudaUserObjectCreate", None, destroy, ctypes.c_uint(1), ctypes.c_uint(1)), destroy


def retain(torch, user_object) -> None:
    """Let the graph that the current stream is captured into hold an object; the reference of the caller goes over."""
    status, identity, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    stream = torch.cuda.current_stream().cuda_stream
    found = (ctypes.byref(status), ctypes.byref(identity), ctypes.byref(graph))
    torch.runtime.call("cudaStreamGetCaptureInfo_v2", stream, *found, None, None)
    assert (status.value, bool(graph)) == (1, True)
    torch.runtime.call("cudaGraphRetainUserObject", graph, user_object, ctypes.c_uint(1), ctypes.c_uint(1))


def test_a_user_object_goes_after_the_last_launch(torch):
    """The graph itself is destroyed as soon as it was captured; what can be launched, while it runs."""
    destroyed, graph = [], torch.cuda.CUDAGraph()
    made, kept = user_object(torch, lambda: destroyed.append(threading.get_ident()))
    with torch.cuda.graph(graph):
        retain(torch, made)
        also_kept = host_function(torch, lambda: None)
    stream = torch.cuda.Stream()
    with torch.held(stream), torch.cuda.stream(stream):
        graph.replay()
        graph.reset()
        time.sleep(0.01)
        assert not destroyed
    assert kept
    assert also_kept
    assert waits_for(lambda: len(destroyed) == 1)
    assert destroyed != [threading.get_ident()]


def test_a_user_object_of_a_capture_that_failed(torch):
    destroyed = []
    made, kept = user_object(torch, lambda: destroyed.append(1))

    def function():
        retain(torch, made)
        torch.cuda.synchronize()

    with pytest.raises(CudaError):
        captured(torch, function)
    assert kept
    assert waits_for(lambda: destroyed == [1])


def test_memory_that_was_freed_is_seen(torch, side):
    graph, pinned = torch.cuda.CUDAGraph(), torch.empty((64,), dtype=torch.int64, pin_memory=True)
    target = torch.empty((64,), dtype=torch.int64, device="cuda")
    with torch.cuda.graph(graph, side):
        target.copy_(pinned, non_blocking=True)
    before = torch.runtime.pinned()
    del pinned
    gc.collect()
    assert torch.runtime.pinned() == before - 1
    graph.replay()
    side.synchronize()
    assert torch.runtime.violations() == "copy from: this memory was freed\n"


def test_errors_that_a_test_orders(torch):
    torch.runtime.fail("cudaHostAlloc", 2, skip=1)
    for wrong in (False, True, False):
        if wrong:
            with pytest.raises(CudaError, match="out of memory"):
                torch.empty((1,), dtype=torch.int64, pin_memory=True)
        else:
            torch.empty((1,), dtype=torch.int64, pin_memory=True)
    assert [torch.runtime.last_error() for _ in range(2)] == [2, 0]


def test_a_forked_child_has_no_cuda(torch):
    assert in_child(lambda: torch.runtime.error_of("cudaDeviceSynchronize")) == 3


@pytest.mark.parametrize(
    ("version", "there", "missing"),
    [
        (12, ["cudaStreamGetCaptureInfo_v2", "cudaStreamGetCaptureInfo_v3"], ["cudaLaunchHostFunc_v2"]),
        (1102, ["cudaStreamGetCaptureInfo"], ["cudaStreamGetCaptureInfo_v2", "cudaUserObjectCreate"]),
        (11, ["cudaStreamGetCaptureInfo_v2", "cudaUserObjectCreate"], ["cudaStreamGetCaptureInfo_v3"]),
        (13, ["cudaStreamGetCaptureInfo"], ["cudaStreamGetCaptureInfo_v2", "cudaStreamGetCaptureInfo_v3"]),
    ],
)
def test_names_by_version(fake_runtimes, version, there, missing):
    library = ctypes.CDLL(str(fake_runtimes(version).path))
    assert all(hasattr(library, name) for name in there)
    assert not any(hasattr(library, name) for name in missing)
