"""KTMoEWrapper in CUDA graphs, on a stand-in for torch and CUDA (fake_cuda/).

What a replay computes has the bits of the same calls on numpy arrays. test_compat_kt_kernel_graphs_gpu.py has what needs a GPU.
"""

import numpy as np
import pytest
from fake_cuda import runtime as kernels
from helpers import BF16, same_bits
from kt_graphs import Captured, assert_same, cases_of, close, eager, on_device, stack, value
from kt_wrappers import EXPERTS, batch, wrapper, write

from ktmoe.errors import InputError

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture
def torch(fake_torch):
    return fake_torch


# What a replay computes


@pytest.mark.parametrize("given", ["none", "number", "object"])
def test_a_replay(torch, folder, given):
    side, inputs = torch.cuda.Stream(), on_device(torch, batch())
    stream = {"none": None, "number": side.cuda_stream, "object": side}[given]
    with wrapper(folder) as w:
        graph = torch.cuda.CUDAGraph()
        current = side if given == "none" else torch.cuda.Stream()
        with torch.cuda.graph(graph, side), torch.cuda.stream(current):
            w.submit_forward(*inputs, stream)
            y = w.sync_forward(inputs[0], stream)
        assert (y.device.type, y.dtype, y.shape) == ("cuda", torch.bfloat16, inputs[0].shape)
        assert (y.array.view(np.uint8) == 0xFF).all()  # nothing ran yet
        for turn in range(3):
            case = batch(turn)
            case[1][0, 1], case[1][1, 0] = -1, EXPERTS
            for tensor, array in zip(inputs, case, strict=True):
                tensor.set_(array)
            graph.replay()
            assert same_bits(value(y), w.forward(*case))


def test_numbers_of_32_bits(torch, folder):
    """Hidden states are rounded, as outside of graphs, and the result has their dtype."""
    x, ids, scores = batch()
    given = [x.astype(np.float32) * 1.001, ids.astype(np.int32), scores]
    made = [
        torch.on_device(array, dtype) for array, dtype in zip(given, (torch.float32, torch.int32, torch.float32), strict=True)
    ]
    graph = torch.cuda.CUDAGraph()
    with wrapper(folder) as w:
        with torch.cuda.graph(graph):
            y = w.forward(*made)
        made[0].set_(given[0] * 2)
        graph.replay()
        torch.cuda.synchronize()
        assert y.dtype == torch.float32
        assert same_bits(y.array, w.forward(given[0] * 2, ids, scores))


def test_no_tokens(torch, folder):
    made = on_device(torch, [array[:0] for array in batch()])
    with wrapper(folder) as w:
        with pytest.raises(InputError, match=r"layer 0: .*a token.*\[0, 4\] ids"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            w.submit_forward(*made)
        assert w.forward(*made, 0).shape == made[0].shape


def test_a_decode_step_of_a_model(torch, folder):
    """Layers whose inputs are the layers' before, one of them twice, replayed without waiting in between, on as many inputs.

    x is what the stream has when the replay gets to the call; what comes after submit_forward() in the stream may change it.
    """
    wrappers, tokens = stack(folder, (0, 0)), 2
    wrappers.append(wrappers[0])
    routes = [batch(layer, tokens)[1:] for layer in range(3)]
    x = on_device(torch, batch(0, tokens))[0]
    routed = [on_device(torch, (batch(0, tokens)[0], *route))[1:] for route in routes]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = x
        for w, route in zip(wrappers, routed, strict=True):
            negative = -hidden
            w.submit_forward(negative, *route)
            torch.launch(kernels.NEGATE_BF16, negative, negative)
            hidden = hidden + w.sync_forward(negative)
    results = []
    for turn in range(8):
        x.set_(batch(turn, tokens)[0])
        graph.replay()
        results.append(torch.empty_like(hidden).copy_(hidden))
    torch.cuda.synchronize()
    for turn, found in enumerate(results):
        expected = batch(turn, tokens)[0]
        for w, route in zip(wrappers, routes, strict=True):
            expected = (expected.astype(np.float32) + w.forward(-expected, *route).astype(np.float32)).astype(BF16)
        assert same_bits(value(found), expected)
    close(wrappers)


# Deferred experts


@pytest.mark.parametrize("deferred", [(9, 9, 9), (2, 0, 0), (0, 3, 1)], ids=str)
def test_deferred_experts(torch, folder, deferred):
    """Also the last layer's call has nothing left over for the next replay."""
    wrappers = stack(folder, deferred)
    captured = Captured(torch, wrappers, cases_of(0, 3))
    plain = stack(folder, (0, 0, 0))
    for turn in range(1, 4):
        cases = cases_of(turn, 3)
        expected = eager(wrappers, cases)
        assert_same(captured.run(cases), expected)
        assert not all(same_bits(*pair) for pair in zip(expected, eager(plain, cases), strict=True))
    close(wrappers + plain)


def test_a_graph_for_each_layer(torch, folder):
    """Pieces of a model: what is deferred in one graph is added in the next one. Other calls beside change nothing."""
    wrappers = stack(folder, (2, 2, 0))
    graphs = [Captured(torch, [w], [case]) for w, case in zip(wrappers, cases_of(0, 3), strict=True)]
    for turn in range(1, 4):
        cases, others, found, found_others = cases_of(turn, 3), cases_of(turn + 10, 3), [], []
        for w, graph, case, other in zip(wrappers, graphs, cases, others, strict=True):
            found += graph.run([case])
            found_others.append(w.forward(*other).copy())
        assert_same(found + found_others, eager(wrappers, cases) + eager(wrappers, others))
    close(wrappers)


def test_a_graph_for_each_layer_with_other_layers_beside(torch, folder, tmp_path):
    """What was deferred for another graph stays there, however many calls of another model its own graph has."""
    wrappers, others = stack(folder, (2, 0)), stack(write("MXFP4", tmp_path, layers=4), (2, 2, 2, 2))
    cases = cases_of(1, 2, 6)
    first = Captured(torch, [wrappers[0], *others], cases[:5])
    second = Captured(torch, wrappers[1:], cases[5:])
    found = first.run(cases[:5]) + second.run(cases[5:])
    assert_same(found, eager([wrappers[0], *others], cases[:5]) + eager(wrappers[1:], cases[5:]))
    close(wrappers + others)


@pytest.mark.parametrize(("layer", "tokens"), [(1, 3), (2, 2)], ids=["another shape", "not the next layer"])
def test_what_is_deferred_for_another_call(torch, folder, layer, tokens):
    """The pass was broken off, as it is outside of graphs."""
    wrappers = stack(folder, (2, 0, 0))
    cases = [batch(0, 2), batch(1, tokens)]
    graphs = [Captured(torch, [w], [case]) for w, case in zip((wrappers[0], wrappers[layer]), cases, strict=True)]
    found = [graph.run([case])[0] for graph, case in zip(graphs, cases, strict=True)]
    assert_same(found, eager([wrappers[0], wrappers[layer]], cases))
    again = Captured(torch, [wrappers[1]], [batch(2, 2)])  # nor is it there for the right call that comes later
    graphs[0].run(cases[:1])
    assert_same(again.run([batch(2, 2)]), eager([wrappers[1]], [batch(2, 2)]))
    close(wrappers)


# Masks, sizes and streams


def test_the_mask_is_read_late(torch, folder):
    """It is changed in place. It counts when the stream gets there, neither at the capture nor at the launch."""
    with wrapper(folder, num_gpu_experts=EXPERTS) as w:
        captured = Captured(torch, [w], [batch()])
        for count in (3, EXPERTS):
            with torch.held(torch.cuda.default_stream()):
                captured.graph.replay()
                w.gpu_experts_mask[...] = np.arange(EXPERTS) < count
            assert_same([value(captured.outputs[0])], eager([w], [batch()]))
        w.gpu_experts_mask = np.arange(EXPERTS) < 6  # another array
        graph = Captured(torch, [w], [batch()])
        assert_same(graph.run([batch()]), eager([w], [batch()]))


def test_graphs_of_several_batch_sizes(torch, folder):
    """Replayed in any order. Memory that all calls share gets larger meanwhile: no other test has as many tokens."""
    wrappers = stack(folder, (2, 2, 0))
    graphs = {tokens: Captured(torch, wrappers, cases_of(0, tokens)) for tokens in (2, 40, 1)}
    for turn, tokens in enumerate((1, 40, 2, 2, 1, 40)):
        cases = cases_of(turn, tokens)
        assert_same(graphs[tokens].run(cases), eager(wrappers, cases))
    close(wrappers)


def test_results_that_are_copied_by_another_stream(torch, folder):
    """The next call on the first stream does not wait for that copy, and must not overwrite what it copies."""
    wrappers, cases = stack(folder, (0, 0, 0)), cases_of(0, 2)
    inputs, graph = [on_device(torch, case) for case in cases], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main, side, outputs = torch.cuda.current_stream(), torch.cuda.Stream(), []
        for w, tensors in zip(wrappers, inputs, strict=True):
            w.submit_forward(*tensors, main)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                outputs.append(w.sync_forward(tensors[0], side))
        main.wait_stream(side)
    expected = eager(wrappers, cases)
    for _ in range(20):  # each in another order
        graph.replay()
        assert_same([value(y) for y in outputs], expected)
    close(wrappers)


def test_submit_and_sync_belong_together(torch, folder):
    made, graphs = on_device(torch, batch()), [torch.cuda.CUDAGraph() for _ in range(4)]
    with wrapper(folder) as w:
        with torch.cuda.graph(graphs[0]):
            w.submit_forward(*made)
        with pytest.raises(InputError, match="captur"):
            w.sync_forward(None, 0)
        w.submit_forward(*made, 0)
        w.cpu_infer.sync()  # else its thread may wait for an event while the next graph is captured
        with pytest.raises(InputError, match="captur"), torch.cuda.graph(graphs[1]):
            w.sync_forward()
        with torch.cuda.graph(graphs[2]):
            w.submit_forward(*made)
        with pytest.raises(InputError, match="captur"), torch.cuda.graph(graphs[3]):
            w.sync_forward()
        w.submit_forward(*made, 0)
        assert same_bits(value(w.sync_forward(None, 0)), w.forward(*batch()))
