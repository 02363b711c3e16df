"""The stand-in for CUDA: what it must do lest it hide an error of ktmoe. The rules are those of cuda_runtime_api.h's comments.

Streams run beside each other, host functions one after the other, a graph's nodes in any order; and what CUDA forbids is seen.
"""

import ctypes
import gc
import threading
import time

import numpy as np
import pytest
from kt_wrappers import eventually

HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
NUMBERS = np.arange(64, dtype=np.int64)
NOT_PERMITTED, CAPTURE_UNSUPPORTED = 800, 900


@pytest.fixture
def torch(fake_torch):
    return fake_torch


def host_function(torch, function):
    """Put a Python function into the current stream, as a host function; returns what must be kept."""
    kept = HOST_FUNCTION(lambda _: function())
    torch.runtime.call("cudaLaunchHostFunc", torch.cuda.current_stream().cuda_stream, kept, None)
    return kept


def test_streams_do_not_wait_for_each_other(torch):
    """But for an event; and nothing of a stream runs before what was there."""
    numbers = torch.on_device(NUMBERS)
    torch.cuda.synchronize()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.held(first):
        with torch.cuda.stream(first):
            one = torch.empty_like(numbers).copy_(numbers)
        with torch.cuda.stream(second):
            two = torch.empty_like(numbers).copy_(numbers)
            second.synchronize()
            second.wait_stream(first)
            three = torch.empty_like(numbers).copy_(one)
        assert np.array_equal(two.array, NUMBERS)
        assert (one.array == -1).all()  # poison
    second.synchronize()
    assert np.array_equal(three.array, NUMBERS)


def test_host_functions_share_one_thread_and_must_not_call_cuda(torch):
    seen, kept = [], []
    for _ in range(3):
        with torch.cuda.stream(torch.cuda.Stream()):
            kept.append(host_function(torch, lambda: seen.append(threading.get_ident())))
            kept.append(host_function(torch, lambda: seen.append(torch.runtime.error_of("cudaDeviceSynchronize"))))
    torch.cuda.synchronize()
    assert len(set(seen) - {NOT_PERMITTED, threading.get_ident()}) == 1
    assert (len(kept), seen.count(NOT_PERMITTED)) == (6, 3)
    assert torch.runtime.violations() == "cudaDeviceSynchronize: called by a host function or a destructor\n" * 3


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
    for _ in range(40):
        calls.clear()
        graph.replay()
        torch.cuda.synchronize()
        orders.add("".join(calls))
    assert orders == {f"begin{middle}end" for middle in ("abc", "bac", "acb")}


@pytest.mark.parametrize(("mode", "others"), [("global", True), ("thread_local", False)])
def test_what_a_capture_forbids(torch, mode, others):
    """Its own thread any of these, and other threads, too, if it is global; but for a thread that relaxes it."""
    event, errors, relaxed, out = torch.cuda.Event(), [], ctypes.c_int(2), ctypes.c_void_p()
    forbidden = [
        ("cudaHostAlloc", ctypes.byref(out), 64, 0),
        ("cudaFreeHost", 0),
        ("cudaStreamSynchronize", 0),
        ("cudaDeviceSynchronize",),
        ("cudaEventSynchronize", event.handle),
    ]
    for name, *arguments in forbidden:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin(mode)
            thread = threading.Thread(
                target=lambda: errors.append(torch.runtime.error_of("cudaEventSynchronize", event.handle))
            )
            thread.start()
            thread.join()
            assert errors.pop() == (CAPTURE_UNSUPPORTED if others else 0)
            assert torch.runtime.error_of(name, *arguments) == CAPTURE_UNSUPPORTED
            torch.runtime.call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(relaxed))
            assert torch.runtime.error_of("cudaEventSynchronize", event.handle) == 0
            torch.runtime.call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(relaxed))
            with pytest.raises(RuntimeError, match="previous error during capture"):
                graph.capture_end()


def test_a_user_object_goes_after_the_last_launch(torch):
    """The graph itself is destroyed as soon as it was captured; what can be launched, while it runs."""
    destroyed, graph, status, number, handle = [], torch.cuda.CUDAGraph(), ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    kept = HOST_FUNCTION(lambda _: destroyed.append(threading.get_ident()))
    made = torch.runtime.made("cudaUserObjectCreate", None, kept, ctypes.c_uint(1), ctypes.c_uint(1))
    with torch.cuda.graph(graph):
        found = ctypes.byref(status), ctypes.byref(number), ctypes.byref(handle)
        torch.runtime.call("cudaStreamGetCaptureInfo_v2", torch.cuda.current_stream().cuda_stream, *found, None, None)
        torch.runtime.call("cudaGraphRetainUserObject", handle, made, ctypes.c_uint(1), ctypes.c_uint(1))
    stream = torch.cuda.Stream()
    with torch.held(stream), torch.cuda.stream(stream):
        graph.replay()
        graph.reset()
        time.sleep(0.01)
        assert not destroyed
    assert eventually(lambda: len(destroyed) == 1)
    assert destroyed != [threading.get_ident()]


def test_memory_that_was_freed_is_seen(torch):
    graph, pinned = torch.cuda.CUDAGraph(), torch.empty((64,), dtype=torch.int64, pin_memory=True)
    target = torch.empty((64,), dtype=torch.int64, device="cuda")
    with torch.cuda.graph(graph):
        target.copy_(pinned, non_blocking=True)
    del pinned
    gc.collect()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.runtime.violations() == "copy from: this memory was freed\n"
