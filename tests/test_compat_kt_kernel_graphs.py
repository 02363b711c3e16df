"""KTMoEWrapper in CUDA graphs, on a stand-in for torch and CUDA (fake_cuda/).

What a replay computes has the bits of the same calls on numpy arrays. test_compat_kt_kernel_graphs_gpu.py has what needs a GPU.
"""

import itertools
import threading

import numpy as np
import pytest
from fake_cuda import runtime as kernels
from helpers import BF16, same_bits
from kt_graphs import Captured, call, on_device, stack, value
from kt_wrappers import EXPERTS, TOP_K, batch, wrapper, write

from ktmoe.compat.kt_kernel import KTMoEWrapper
from ktmoe.errors import InputError

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture
def torch(fake_torch):
    return fake_torch


def close(wrappers):
    for w in wrappers:
        w.close()


def cases_of(turn, tokens, layers=3):
    return [batch(100 * turn + layer, tokens) for layer in range(layers)]


def eager(wrappers, cases):
    """The same calls on numpy arrays."""
    return [w.forward(*case).copy() for w, case in zip(wrappers, cases, strict=True)]


def assert_same(found, expected):
    assert [same_bits(*pair) for pair in zip(found, expected, strict=True)] == [True] * len(expected)


# What a replay computes


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("given", ["none", "number", "object"])
def test_a_replay(torch, folder, given, tokens):
    side = torch.cuda.Stream()
    inputs = on_device(torch, batch(0, tokens))
    stream = {"none": None, "number": side.cuda_stream, "object": side}[given]
    with wrapper(folder) as w:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, side):
            y = call(w, inputs, stream)
            assert torch.cuda.is_current_stream_capturing()
        assert (y.device.type, y.dtype, y.shape) == ("cuda", torch.bfloat16, inputs[0].shape)
        assert (y.array.view(np.uint8) == 0xFF).all()  # nothing ran yet
        for turn in range(4):
            case = batch(turn, tokens)
            for tensor, array in zip(inputs, case, strict=True):
                tensor.set_(array)
            graph.replay()
            assert same_bits(value(y), w.forward(*case))


def test_ids_of_32_bits_and_ids_that_are_none(torch, folder):
    x, ids, scores = batch()
    ids[0, 1], ids[1, 0], ids[2] = -1, EXPERTS, -1
    made = on_device(torch, (x, ids, scores))
    made[1] = torch.on_device(ids.astype(np.int32), torch.int32)
    torch.cuda.synchronize()
    with wrapper(folder) as w:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = call(w, made, None)
        graph.replay()
        assert same_bits(value(y), w.forward(x, ids, scores))


def test_hidden_states_of_32_bits(torch, folder):
    """They are rounded, as outside of graphs, and the result has their dtype."""
    made, graph = on_device(torch, batch()), torch.cuda.CUDAGraph()
    made[0] = torch.on_device(batch()[0].astype(np.float32) * 1.001, torch.float32)
    torch.cuda.synchronize()
    with wrapper(folder) as w:
        with torch.cuda.graph(graph):
            y = call(w, made, None)
        for seed in range(2):
            x, ids, scores = batch(seed)
            wide = x.astype(np.float32) * 1.001
            for tensor, array in zip(made, (wide, ids, scores), strict=True):
                tensor.set_(array)
            graph.replay()
            torch.cuda.synchronize()
            assert y.dtype == torch.float32
            assert same_bits(y.array, w.forward(wide, ids, scores))


def test_no_tokens(torch, folder):
    made = on_device(torch, [array[:0] for array in batch()])
    with wrapper(folder) as w:
        with pytest.raises(InputError, match=r"layer 0: .*a token.*\[0, 4\] ids"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            w.submit_forward(*made, torch.cuda.current_stream())
        assert w.forward(*made, 0).shape == made[0].shape


def test_forward_is_captured_too(torch, folder):
    made, graph = on_device(torch, batch()), torch.cuda.CUDAGraph()
    with wrapper(folder) as w:
        with torch.cuda.graph(graph):
            y = w.forward(*made, torch.cuda.current_stream())
        graph.replay()
        assert same_bits(value(y), w.forward(*batch()))


def test_what_comes_before_and_after_in_the_graph(torch, folder):
    """x is what the stream has when the replay gets to the call; y is there for what comes after it."""
    case, graph = batch(), torch.cuda.CUDAGraph()
    x, ids, scores = on_device(torch, case)
    with wrapper(folder) as w:
        with torch.cuda.graph(graph):
            negative = -x
            w.submit_forward(negative, ids, scores, torch.cuda.current_stream())
            torch.launch(kernels.FILL, negative)
            y = w.sync_forward(negative, torch.cuda.current_stream())
            after = -y
        for seed in range(3):
            case = batch(seed)
            for tensor, array in zip((x, ids, scores), case, strict=True):
                tensor.set_(array)
            graph.replay()
            assert same_bits(value(after), -w.forward(-case[0], *case[1:]))


def test_a_decode_step_of_a_model(torch, folder):
    """Layers whose inputs are the layers' before, replayed without waiting in between, on as many inputs."""
    wrappers = stack(folder, (0, 0, 0))
    tokens, routes = 2, [batch(layer, 2)[1:] for layer in range(3)]
    x = on_device(torch, batch(0, tokens))[0]
    routed = [on_device(torch, (batch(0, tokens)[0], *route))[1:] for route in routes]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = x
        for w, route in zip(wrappers, routed, strict=True):
            hidden = hidden + call(w, (hidden, *route), torch.cuda.current_stream())
    results = []
    for turn in range(8):
        x.set_(batch(turn, tokens)[0])
        graph.replay()
        results.append(torch.empty_like(hidden).copy_(hidden))
    torch.cuda.synchronize()
    for turn, found in enumerate(results):
        expected = batch(turn, tokens)[0]
        for w, route in zip(wrappers, routes, strict=True):
            expected = (expected.astype(np.float32) + w.forward(expected, *route).astype(np.float32)).astype(BF16)
        assert same_bits(value(found), expected)
    close(wrappers)


def test_one_layer_twice_in_a_graph(torch, folder):
    with wrapper(folder) as w:
        captured = Captured(torch, [w, w], cases_of(0, 2, 2))
        for turn in range(3):
            cases = cases_of(turn, 2, 2)
            assert_same(captured.run(cases), eager([w, w], cases))


# Deferred experts


@pytest.mark.parametrize("deferred", [(1, 1, 1), (2, 2, 2), (9, 9, 9), (2, 0, 0), (0, 3, 1)], ids=str)
@pytest.mark.parametrize("tokens", [1, 3])
def test_deferred_experts(torch, folder, deferred, tokens):
    """Also the last layer's call has nothing left over for the next replay."""
    wrappers = stack(folder, deferred)
    captured = Captured(torch, wrappers, cases_of(0, tokens))
    plain = stack(folder, (0, 0, 0))
    for turn in range(1, 5):
        cases = cases_of(turn, tokens)
        expected = eager(wrappers, cases)
        assert_same(captured.run(cases), expected)
        assert not all(same_bits(*pair) for pair in zip(expected, eager(plain, cases), strict=True))
    close(wrappers + plain)


def test_deferred_experts_of_tokens_that_agree(torch, folder):
    """In one replay a token's experts may be deferred, and in the next one all are protected."""
    wrappers = stack(folder, (2, 0))
    captured = Captured(torch, wrappers, cases_of(0, 16, 2))
    for turn in range(4):
        cases = cases_of(turn, 16, 2)
        if turn % 2:
            cases[0][1][:] = np.arange(TOP_K)
            cases[0][2][:, :2] += 2
        assert_same(captured.run(cases), eager(wrappers, cases))
    close(wrappers)


def test_eager_passes_and_replays_do_not_mix(torch, folder):
    """Whichever comes between the layers of the other."""
    wrappers = stack(folder, (2, 2, 0))
    graphs = [Captured(torch, [w], cases_of(0, 2)[index : index + 1]) for index, w in enumerate(wrappers)]
    cases, others = cases_of(1, 2), cases_of(2, 2)
    expected, expected_others = eager(wrappers, cases), eager(wrappers, others)
    for order in set(itertools.permutations("eeeggg")):
        places, found, found_others = {"e": 0, "g": 0}, [], []
        for which in order[: 6 if order[0] == "e" else 4]:  # some end in the middle: the next order begins anew
            index = places[which]
            places[which] += 1
            if which == "e":
                found_others.append(wrappers[index].forward(*others[index]).copy())
            else:
                found += graphs[index].run([cases[index]])
        assert_same(found, expected[: len(found)])
        assert_same(found_others, expected_others[: len(found_others)])
    close(wrappers)


def test_a_graph_for_each_layer(torch, folder):
    """Pieces of a model: what is deferred in one graph is added in the next one."""
    wrappers = stack(folder, (2, 2, 0))
    graphs = [Captured(torch, [w], cases_of(0, 3)[index : index + 1]) for index, w in enumerate(wrappers)]
    for turn in range(1, 4):
        cases = cases_of(turn, 3)
        for graph, case in zip(graphs, cases, strict=True):
            graph.replay([case])
        assert_same([value(graph.outputs[0]) for graph in graphs], eager(wrappers, cases))
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
    for _ in range(2):
        found = [graph.run([case])[0] for graph, case in zip(graphs, cases, strict=True)]
        assert_same(found, eager([wrappers[0], wrappers[layer]], cases))
    again = Captured(torch, [wrappers[1]], [batch(2, 2)])  # nor is it there for the right call that comes later
    graphs[0].run(cases[:1])
    assert_same(again.run([batch(2, 2)]), eager([wrappers[1]], [batch(2, 2)]))
    close(wrappers)


# Masks


def test_the_mask_counts_when_the_call_runs(torch, folder):
    """It is changed in place, as SGLang does between steps."""
    wrappers = stack(folder, (2, 0))
    captured = Captured(torch, wrappers, cases_of(0, 2, 2))
    rng = np.random.default_rng(0)
    for turn in range(6):
        for w in wrappers:
            w.gpu_experts_mask[...] = rng.random(EXPERTS) < turn / 5
        cases = cases_of(turn, 2, 2)
        assert_same(captured.run(cases), eager(wrappers, cases))
    assert not captured.outputs[0].array.any()  # all experts were on the GPU at last
    close(wrappers)


def test_the_mask_is_read_late(torch, folder):
    """Neither when the graph is captured nor when it is launched, but when the stream gets there."""
    with wrapper(folder, num_gpu_experts=EXPERTS) as w:
        captured = Captured(torch, [w], [batch()])
        with torch.held(torch.cuda.default_stream()):
            captured.graph.replay()
            w.gpu_experts_mask[...] = np.arange(EXPERTS) < 3
        assert_same([value(captured.outputs[0])], eager([w], [batch()]))
        w.gpu_experts_mask = np.arange(EXPERTS) < 6  # another array
        graph = Captured(torch, [w], [batch()])
        assert_same(graph.run([batch()]), eager([w], [batch()]))


# Several graphs, streams and threads


@pytest.mark.parametrize("sizes", [[], [1, 2, 4]], ids=["unknown sizes", "captured sizes"])
def test_graphs_of_several_batch_sizes(torch, folder, sizes):
    """As an engine captures them, the largest first; replayed in any order."""
    KTMoEWrapper.set_capture_batch_sizes(sizes)
    wrappers = stack(folder, (2, 2, 0))
    graphs = {tokens: Captured(torch, wrappers, cases_of(0, tokens)) for tokens in (4, 2, 1)}
    for turn, tokens in enumerate((1, 4, 2, 2, 1, 4)):
        cases = cases_of(turn, tokens)
        assert_same(graphs[tokens].run(cases), eager(wrappers, cases))
    close(wrappers)


def test_two_streams_at_once(torch, folder):
    """Two graphs of the same layers, each launched by a thread of its own, and eager calls beside them."""
    wrappers = stack(folder, (0, 0, 0))
    graphs = [Captured(torch, wrappers, cases_of(0, tokens)) for tokens in (1, 3)]
    expected = {tokens: [eager(wrappers, cases_of(turn, tokens)) for turn in range(10)] for tokens in (1, 3)}
    wrong = []

    def launch(graph, tokens):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for turn in range(10):
                graph.replay(cases_of(turn, tokens))
                stream.synchronize()
                found = [y.array.view(BF16) for y in graph.outputs]
                wrong.extend(not same_bits(*pair) for pair in zip(found, expected[tokens][turn], strict=True))

    threads = [threading.Thread(target=launch, args=pair) for pair in zip(graphs, (1, 3), strict=True)]
    for thread in threads:
        thread.start()
    for turn in range(10):
        assert_same(eager(wrappers, cases_of(turn, 3)), expected[3][turn])
    for thread in threads:
        thread.join()
    assert wrong == [False] * 60
    close(wrappers)


def test_streams_of_one_capture(torch, folder):
    """submit_forward() and sync_forward() in two streams, as those order what overlaps with the GPU's experts."""
    case, graph = batch(), torch.cuda.CUDAGraph()
    x, ids, scores = on_device(torch, case)
    with wrapper(folder) as w:
        with torch.cuda.graph(graph):
            main, side = torch.cuda.current_stream(), torch.cuda.Stream()
            w.submit_forward(x, ids, scores, main)
            side.wait_stream(main)
            gpu = -x
            with torch.cuda.stream(side):
                y = w.sync_forward(x, side)
            main.wait_stream(side)
            total = gpu + y
        for seed in range(6):
            torch.runtime.seed(seed)
            graph.replay()
            both = -case[0].astype(np.float32) + w.forward(*case).astype(np.float32)
            assert same_bits(value(total), both.astype(BF16))


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
    for seed in range(20):
        torch.runtime.seed(seed)
        graph.replay()
        assert_same([value(y) for y in outputs], expected)
    close(wrappers)


def test_a_replay_needs_no_python(torch, folder):
    """This thread waits for replays, and keeps all others from running Python meanwhile."""
    wrappers = stack(folder, (2, 2, 0))
    captured = Captured(torch, wrappers, cases_of(0, 2))
    captured.replay(cases_of(1, 2))
    for _ in range(20):
        captured.graph.replay()
    assert torch.runtime.done_while_the_gil_is_held(0, seconds=20)
    assert_same([value(y) for y in captured.outputs], eager(wrappers, cases_of(1, 2)))
    close(wrappers)


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_modes_of_capture(torch, folder, mode):
    with wrapper(folder) as w:
        captured = Captured(torch, [w], [batch()], capture_error_mode=mode)
        assert_same(captured.run([batch(1)]), eager([w], [batch(1)]))


# submit_forward() and sync_forward() in different places


def test_submit_and_sync_belong_together(torch, folder):
    made, graphs = on_device(torch, batch()), [torch.cuda.CUDAGraph() for _ in range(4)]
    with wrapper(folder) as w:
        with torch.cuda.graph(graphs[0]):
            w.submit_forward(*made, torch.cuda.current_stream())
        with pytest.raises(InputError, match="captur"):
            w.sync_forward(None, 0)
        w.submit_forward(*made, 0)
        w.cpu_infer.sync()  # else its thread may wait for an event while the next graph is captured
        with pytest.raises(InputError, match="captur"), torch.cuda.graph(graphs[1]):
            w.sync_forward(None, torch.cuda.current_stream())
        with torch.cuda.graph(graphs[2]):
            w.submit_forward(*made, torch.cuda.current_stream())
        with pytest.raises(InputError, match="captur"), torch.cuda.graph(graphs[3]):
            w.sync_forward(None, torch.cuda.current_stream())
        captured = Captured(torch, [w], [batch()])
        assert_same(captured.run([batch(1)]), eager([w], [batch(1)]))
        w.submit_forward(*made, 0)
        assert same_bits(value(w.sync_forward(None, 0)), w.forward(*batch()))
