"""KTMoEWrapper in CUDA graphs, by real torch on a real GPU; skipped where there is none.

What replays compute has the bits of the same calls on numpy arrays. test_compat_kt_kernel_graphs.py is for every machine.
"""

import gc
import os
import subprocess
import sys

import kt_graphs
import numpy as np
import pytest
from environments import ROOT
from helpers import BF16, same_bits
from kt_graphs import assert_same, cases_of, close, eager, stack
from kt_wrappers import EXPERTS, HIDDEN, TOP_K, batch, eventually, wrapper

from ktmoe.compat import cuda_runtime
from ktmoe.compat.engine import ENGINE

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture(scope="module")
def torch():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA device here")
    return torch


def tensors(torch, case) -> list:
    """x, ids and weights on the GPU."""
    x, ids, weights = (torch.from_numpy(array.copy()).to("cuda") for array in (case[0].view(np.int16), *case[1:]))
    return [x.view(torch.bfloat16), ids, weights]


def array(tensor) -> np.ndarray:
    """A tensor's numbers on the host, once the current stream is done."""
    tensor = tensor.cpu()
    return tensor.numpy() if "bfloat16" not in str(tensor.dtype) else tensor.float().numpy().astype(BF16)


class Captured(kt_graphs.Captured):
    make, read = staticmethod(tensors), staticmethod(array)


@pytest.mark.parametrize("deferred", [(0, 0, 0), (2, 2, 2), (1, 3, 0)], ids=str)
@pytest.mark.parametrize("tokens", [1, 5])
def test_replays(torch, folder, deferred, tokens):
    wrappers = stack(folder, deferred)
    captured = Captured(torch, wrappers, cases_of(0, tokens))
    for turn in range(10):
        cases = cases_of(turn, tokens)
        assert_same(captured.run(cases), eager(wrappers, cases))
    del captured
    close(wrappers)


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_modes_of_capture(torch, folder, mode):
    with wrapper(folder) as w:
        captured = Captured(torch, [w], [batch()], capture_error_mode=mode)
        assert_same(captured.run([batch(1)]), eager([w], [batch(1)]))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("ids_dtype", ["int32", "uint8", "int64"])
def test_dtypes(torch, folder, dtype, ids_dtype):
    """Of hidden states and ids, without gradients, as engines run models. Torch converts in the graph, not at its capture."""
    dtype = getattr(torch, dtype)
    with wrapper(folder) as w, torch.inference_mode():
        x, ids, weights = tensors(torch, batch())
        x, ids, graph = x.to(dtype), ids.to(getattr(torch, ids_dtype)), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = w.forward(x, ids, weights, torch.cuda.current_stream())
        for seed in range(3):
            case = batch(seed)
            for tensor, new in zip((x, ids, weights), tensors(torch, case), strict=True):
                tensor.copy_(new)
            graph.replay()
            assert y.dtype == dtype
            assert torch.equal(y.cpu(), torch.from_numpy(w.forward(*case).astype(np.float32)).to(dtype))


@pytest.mark.parametrize("deferred", [(0, 0, 0), (2, 2, 0)], ids=str)
def test_a_decode_step(torch, folder, deferred):
    """What torch computes from a layer's result, such as the next layer's ids, is in the same graph."""
    wrappers, seen = stack(folder, deferred), []

    def step(x):  # without products of matrices, so that it has the same bits with and without a graph
        seen.clear()
        stream = torch.cuda.current_stream().cuda_stream
        for w in wrappers:
            scores = x.float().reshape(len(x), EXPERTS, -1).sum(-1)
            weights, ids = torch.topk(torch.softmax(scores, dim=-1), TOP_K, dim=-1)
            w.submit_forward(x, ids, weights, stream)
            shared = torch.nn.functional.silu(x)  # the GPU's work meanwhile
            y = w.sync_forward(x, stream)
            seen.append([tensor.clone() for tensor in (x, ids, weights, y)])
            x = x + shared + y
        return x

    x, side, graph = torch.randn(2, HIDDEN, device="cuda").to(torch.bfloat16), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):  # what torch makes at the first call is made before the capture
        step(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        result = step(x)
    captured = list(seen)
    for turn in range(20):
        x.copy_(torch.randn(2, HIDDEN, device="cuda") * (1 + turn % 3))
        graph.replay()
        cases = [[array(tensor) for tensor in layer] for layer in captured]
        assert_same([y for *_, y in cases], eager(wrappers, [case for *case, _ in cases]))
        assert torch.equal(step(x), result)
    del captured
    seen.clear()
    close(wrappers)


def test_many_launches_that_nobody_waits_for(torch, folder):
    """More than fit into CUDA's queue; in between are copies of the results."""
    wrappers = stack(folder, (2, 0))
    captured = Captured(torch, wrappers, cases_of(0, 1, 2))
    inputs = [tensors(torch, batch(turn, 1)) for turn in range(4)]
    results = []
    for turn in range(2000):
        for kept in captured.inputs:
            for tensor, new in zip(kept, inputs[turn % 4], strict=True):
                tensor.copy_(new)
        captured.graph.replay()
        if turn >= 1996:
            results.append([y.clone() for y in captured.outputs])
    for turn, found in enumerate(results):
        cases = [batch(turn, 1)] * 2
        assert_same([array(y) for y in found], eager(wrappers, cases))
    del captured
    close(wrappers)


def test_graphs_of_several_sizes_share_a_pool(torch, folder):
    """As an engine captures them: the largest first, all in one pool of memory."""
    wrappers = stack(folder, (2, 2, 0))
    graphs, pool = {}, None
    for tokens in (4, 2, 1):
        graphs[tokens] = Captured(torch, wrappers, cases_of(0, tokens), pool=pool)
        pool = pool or graphs[tokens].graph.pool()
    for turn, tokens in enumerate((1, 4, 2, 2, 1, 4)):
        cases = cases_of(turn, tokens)
        assert_same(graphs[tokens].run(cases), eager(wrappers, cases))
    graphs.clear()
    close(wrappers)


def test_two_streams_of_a_capture(torch, folder):
    """submit_forward() in one and sync_forward() in another; work of the GPU beside both."""
    case, graph, side = batch(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    x, ids, weights = tensors(torch, case)
    with wrapper(folder) as w:
        with torch.cuda.graph(graph):
            main = torch.cuda.current_stream()
            w.submit_forward(x, ids, weights, main)
            side.wait_stream(main)
            gpu = -x
            with torch.cuda.stream(side):
                y = w.sync_forward(x, side)
            main.wait_stream(side)
            total = gpu + y
        for _ in range(5):
            graph.replay()
            both = -case[0].astype(np.float32) + w.forward(*case).astype(np.float32)
            assert same_bits(array(total), both.astype(BF16))


def test_two_streams_launch_at_once(torch, folder):
    """Two graphs of the same layers. Their host functions may share CUDA's thread."""
    wrappers = stack(folder, (0, 0))
    graphs = [Captured(torch, wrappers, [batch(seed, 2)] * 2) for seed in range(2)]
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(200):
        for stream, captured in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                captured.graph.replay()
    torch.cuda.synchronize()
    for seed, captured in enumerate(graphs):
        assert_same([array(y) for y in captured.outputs], eager(wrappers, [batch(seed, 2)] * 2))
    del captured
    graphs.clear()
    close(wrappers)


def test_the_mask_counts_when_the_call_runs(torch, folder):
    with wrapper(folder, gpu_experts_mask=torch.zeros(EXPERTS, dtype=torch.bool)) as w:
        captured = Captured(torch, [w], [batch()])
        for count in (0, 3, EXPERTS, 5):
            w.gpu_experts_mask.copy_(torch.arange(EXPERTS) < count)
            assert_same(captured.run([batch(count)]), eager([w], [batch(count)]))


def test_a_graph_that_is_gone(torch, folder):
    """CUDA calls the destructor some time after the graph was destroyed; then its memory is given back."""
    with wrapper(folder) as w:
        captured = Captured(torch, [w], [batch()])
        for _ in range(20):
            captured.graph.replay()
        assert len(ENGINE.captures.live) == 1
        captured.graph.reset()
        del captured
        gc.collect()
        torch.cuda.synchronize()
        assert eventually(lambda: (w.forward(*batch()), not ENGINE.captures.live)[1])


def test_a_capture_that_fails_half_way(torch, folder):
    def fails():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            w.submit_forward(*made, torch.cuda.current_stream())
            raise ZeroDivisionError

    with wrapper(folder) as w:
        made = tensors(torch, batch())
        with pytest.raises(ZeroDivisionError):
            fails()
        captured = Captured(torch, [w], [batch()])
        assert_same(captured.run([batch(1)]), eager([w], [batch(1)]))


def test_the_runtime_is_torchs(torch):
    runtime = cuda_runtime.find()
    assert runtime.has_user_objects
    assert f".so.{torch.version.cuda.partition('.')[0]}" in runtime.path
    with torch.cuda.stream(torch.cuda.Stream()):
        assert runtime.capturing(torch.cuda.current_stream().cuda_stream) is None


#: A process that ends while replays run.
PROCESS = """
import sys
import torch
from test_compat_kt_kernel_graphs_gpu import Captured
from kt_graphs import cases_of, stack

wrappers = stack(sys.argv[1], (2, 0))
captured = Captured(torch, wrappers, cases_of(0, 2, 2))
for _ in range(500):
    captured.graph.replay()
print("ready", flush=True)
"""


def test_a_process_that_ends_while_replays_run(torch, folder):
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-c", PROCESS, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "ready\n"), done.stderr
