"""KTMoEWrapper on numpy arrays: its arguments, weights, masks, buffers, threads, errors, and what close() gives back."""

import gc
import inspect
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers import BF16, assert_right, in_child, same_bits
from kt_wrappers import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, arguments, batch, nothing_is_left, wrapper, write  # noqa: F401

import ktmoe
from ktmoe import GatedActivation, MoELayer, load_experts
from ktmoe.compat import kt_kernel, methods, weights
from ktmoe.compat.engine import ENGINE
from ktmoe.compat.kt_kernel import KTMoEWrapper, generate_gpu_experts_masks
from ktmoe.errors import ClosedError, FormatError, InputError, MissingTensorError, UnavailableError
from ktmoe.machine import numa

METHODS = ("MXFP4", "RAWINT4", "BF16")
REVERSED = np.arange(EXPERTS)[::-1]


@pytest.fixture(scope="module", params=METHODS)
def checkpoint(request, tmp_path_factory):
    return request.param, write(request.param, tmp_path_factory.mktemp(request.param), layers=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write("MXFP4", tmp_path_factory.mktemp("mxfp4"), layers=3)


# Results


def test_forward(checkpoint):
    """As the layer itself, which is right by the reference; any batch size, also beyond chunked_prefill_size."""
    method, folder = checkpoint
    experts = load_experts(folder, 1)
    with wrapper(folder, 1, method=method) as w, MoELayer(experts) as layer:
        for tokens in (1, 4, 5, 33):
            x, ids, scores = batch(tokens, tokens)
            y = w.forward(x, ids, scores)
            assert_right(layer, experts, x, ids, scores, y)
            assert same_bits(y, layer.forward(x, ids, scores))
            w.submit_forward(x, ids, scores, None)
            assert same_bits(w.sync_forward(x, None), y)


def test_what_kt_kernel_converts_is_converted(folder):
    x, ids, scores = batch()
    with wrapper(folder) as w:
        y = w.forward(x, ids, scores)
        assert same_bits(w.forward(x.view(np.uint16), ids, scores), y.view(np.uint16))
        assert same_bits(w.forward(x.astype(np.float32), ids.astype(np.int32), scores.astype(np.float64)), y.astype(np.float32))
        assert same_bits(w.forward(x.reshape(5, 1, HIDDEN), ids, scores), y)
        assert same_bits(w.forward(x[::-1], ids[::-1], scores[::-1]), y[::-1].copy())


@pytest.mark.parametrize(("tokens", "top_k"), [(0, TOP_K), (3, 0)])
def test_nothing_to_compute(folder, tokens, top_k):
    x, ids, scores = batch(0, tokens, top_k)
    with wrapper(folder) as w:
        y = w.forward(x, ids, scores)
        assert y.shape == x.shape
        assert not y.astype(np.float32).any()


def test_skipped_slots_add_zero(folder):
    x, ids, scores = batch()
    with wrapper(folder) as w, MoELayer.from_checkpoint(folder, 0) as layer:
        ids[0] = -1
        ids[1, :2] = (EXPERTS, np.iinfo(np.int64).max)
        ids[2, 0] = np.iinfo(np.int64).min
        w.gpu_experts_mask[[0, 3]] = True
        seen = np.where(np.isin(ids, (0, 3)), -1, ids)
        y = w.forward(x, ids, scores)
        assert same_bits(y, layer.forward(x, seen, scores))
        assert not y[0].astype(np.float32).any()
        w.gpu_experts_mask[:] = True
        assert not w.forward(x, ids, scores).astype(np.float32).any()


def test_the_mask_is_read_when_a_call_is_submitted(folder):
    x, ids, scores = batch()
    with wrapper(folder) as w:
        y = w.forward(x, ids, scores)
        w.submit_forward(x, ids, scores)
        w.gpu_experts_mask[:] = True
        assert same_bits(w.sync_forward(x), y)
        w.gpu_experts_mask = np.zeros(EXPERTS, bool)  # replaced instead of changed: the attribute counts
        assert same_bits(w.forward(x, ids, scores), y)
        w.gpu_experts_mask = np.zeros(EXPERTS, int)
        with pytest.raises(InputError, match=r"gpu_experts_mask must be bool \[8\], found int64"):
            w.forward(x, ids, scores)


def test_the_mask_is_a_copy(folder):
    given = np.zeros(EXPERTS, bool)
    given[2] = True
    w = KTMoEWrapper(**arguments(gpu_experts_mask=given))
    given[3] = True
    assert w.gpu_experts_mask.tolist() == [expert == 2 for expert in range(EXPERTS)]
    assert w.num_gpu_experts == 1


def test_num_gpu_experts(folder):
    x, ids, scores = batch()
    named = arguments(weight_path=folder, num_gpu_experts=3)
    del named["gpu_experts_mask"]
    with KTMoEWrapper(**named) as w, MoELayer.from_checkpoint(folder, 0) as layer:
        w.load_weights()
        assert w.num_gpu_experts == 3
        assert same_bits(w.forward(x, ids, scores), layer.forward(x, np.where(ids < 3, -1, ids), scores))


@pytest.mark.parametrize(
    "physical", [REVERSED, np.array([5, 5, 0, 1]), np.arange(12) % EXPERTS], ids=["reversed", "few", "more"]
)
def test_physical_slots(folder, physical):
    """A slot's expert is whichever the map says; several slots may have the same."""
    slots = len(physical)
    x, ids, scores = batch(3, experts=slots)
    experts = load_experts(folder, 0)
    with wrapper(folder, physical=physical, num_experts=slots) as w, MoELayer(experts) as layer:
        assert_right(layer, experts, x, physical[ids], scores, w.forward(x, ids, scores))


@pytest.mark.parametrize("as_bits", [False, True])
def test_weights_from_tensors(tmp_path, as_bits):
    experts = load_experts(write("BF16", tmp_path), 0)
    gate, up, down = (np.stack([experts.matrix(e, p).codes for e in range(EXPERTS)]) for p in ("gate", "up", "down"))
    if as_bits:
        gate, up, down = (array.view(np.uint16) for array in (gate, up, down))
    x, ids, scores = batch()
    with KTMoEWrapper(**arguments(method="BF16")) as w, MoELayer(experts) as layer:
        w.load_weights_from_tensors(gate, up, down, np.arange(EXPERTS))
        assert same_bits(w.forward(x, ids, scores), layer.forward(x, ids, scores))
        w.load_weights_from_tensors(gate, up, down, REVERSED)
        assert_right(layer, experts, x, REVERSED[ids], scores, w.forward(x, ids, scores))


@pytest.mark.parametrize(
    ("given", "activation"),
    [
        ({}, GatedActivation(limit=0.25)),  # what the checkpoint says
        ({"swiglu_limit": 0.0}, GatedActivation()),
        ({"swiglu_limit": 0.125}, GatedActivation(limit=0.125)),
        ({"swiglu_limit": 0.5, "swiglu_alpha": 1.702}, GatedActivation(1.702, 0.5, 1.0)),
        ({"swiglu_limit": 0.0, "swiglu_alpha": 1.5}, GatedActivation(alpha=1.5, up_offset=1.0)),
        ({"swiglu_alpha": 1.5}, GatedActivation(alpha=1.5, up_offset=1.0)),
    ],
)
def test_activation(tmp_path, given, activation):
    folder = write("MXFP4", tmp_path, swiglu_limit=0.25)
    x, ids, scores = batch()
    experts = load_experts(folder, 0).with_activation(activation)
    with wrapper(folder, **given) as w, MoELayer(experts) as layer:
        expected = layer.forward(x, ids, scores)
        assert same_bits(w.forward(x, ids, scores), expected)
        others = [GatedActivation(limit=0.375), GatedActivation(1.25, up_offset=1.0)]
        for other in others:  # the numbers tell one from another
            with MoELayer(experts.with_activation(other)) as different:
                assert not same_bits(different.forward(x, ids, scores), expected)


# Arguments


def test_positional_arguments_are_in_kt_kernels_order():
    assert list(inspect.signature(KTMoEWrapper).parameters) == [
        *("layer_idx", "num_experts", "num_experts_per_tok", "hidden_size", "moe_intermediate_size", "gpu_experts_mask"),
        *("cpuinfer_threads", "threadpool_count", "weight_path", "chunked_prefill_size", "cpu_save"),
        *("max_deferred_experts_per_token", "method", "numa_nodes", "mode", "num_gpu_experts", "lora_rank", "lora_alpha"),
        *("lora_dropout", "max_cache_depth", "group_size", "zero_point", "full_weight_grad", "swiglu_limit", "swiglu_alpha"),
    ]


def test_attributes_that_callers_read(folder):
    w = KTMoEWrapper(**arguments(weight_path=folder, layer_idx=7, max_deferred_experts_per_token=None))
    assert (w.layer_idx, w.num_experts, w.num_experts_per_tok, w.hidden_size) == (7, EXPERTS, TOP_K, HIDDEN)
    assert (w.moe_intermediate_size, w.num_gpu_experts, w.weight_path, w.method) == (INTERMEDIATE, 0, folder, "MXFP4")
    assert (w.chunked_prefill_size, w.max_deferred_experts_per_token, w.cpu_save) == (4, 0, False)


def test_the_queue_that_callers_wait_for(folder, monkeypatch):
    started, go, done = threading.Event(), threading.Event(), []

    def slow(*_arguments, **_named):
        started.set()
        assert go.wait(60)
        done.append(True)

    w = KTMoEWrapper(**arguments(weight_path=folder))
    assert w.moe is None
    w.load_weights()
    assert isinstance(w.moe, MoELayer)
    with monkeypatch.context() as patch:
        patch.setattr(MoELayer, "forward", slow)
        w.submit_forward(*batch())
        assert started.wait(60)
        threading.Timer(0.05, go.set).start()
        w.cpu_infer.sync()
        assert done
    assert w.cpu_infer is KTMoEWrapper(**arguments()).cpu_infer
    w.close()


@pytest.mark.parametrize("method", sorted(methods.MISSING))
def test_methods_without_weights_here(method):
    with pytest.raises(UnavailableError, match=rf"method '{method}': .*yet: .*BF16, MXFP4, RAWINT4"):
        KTMoEWrapper(**arguments(method=method))


def test_known_methods():
    known = {"AMXINT4", "AMXINT8", "FP8", "FP8_PERCHANNEL", "GPTQ_INT4", "LLAMAFILE", "MOE_INT4", "MOE_INT8", "MXFP8"}
    assert known | set(METHODS) <= set(methods.MODES["inference"])


@pytest.mark.parametrize("suffix", ["", "_SkipLoRA"])
@pytest.mark.parametrize("name", ["AMXBF16", "AMXINT8", "AMXINT4", "AMXINT4_1", "AMXINT4_KGroup", "AMXINT4_1KGroup"])
def test_fine_tuning(name, suffix):
    tuning = {"lora_rank": 8, "lora_alpha": 16.0, "max_cache_depth": 2, "group_size": 128, "zero_point": True}
    tuning |= {"lora_dropout": 0.1, "full_weight_grad": False, "num_gpu_experts": 0}
    with pytest.raises(UnavailableError, match="no backward pass and no LoRA; what works is mode 'inference' with method BF16"):
        KTMoEWrapper(**arguments(mode="sft", method=f"{name}_SFT{suffix}", **tuning))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mode": "train"}, "mode must be one of 'inference', 'sft', found 'train'"),
        ({"method": "INT3"}, "method must be one of AMXINT4, AMXINT8, BF16, .* in mode 'inference', found 'INT3'"),
        ({"method": "AMXBF16_SFT"}, "in mode 'inference', found 'AMXBF16_SFT'"),
        ({"mode": "sft"}, "method must be one of AMXBF16_SFT, .* in mode 'sft', found 'MXFP4'"),
        ({"layer_idx": -1}, "layer_idx must be a whole number, 0 or more, found -1"),
        ({"num_experts": 0}, "num_experts must be a whole number, from 1 to 268435456, found 0"),
        ({"num_experts": 2**50}, f"num_experts must be a whole number, from 1 to 268435456, found {2**50}"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be at most num_experts 8, found 9"),
        ({"hidden_size": 1.5}, "hidden_size must be a whole number, 1 or more, found 1.5"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size must be a whole number"),
        ({"max_deferred_experts_per_token": -1}, "max_deferred_experts_per_token must be .* 0 or more, found -1"),
        ({"threadpool_count": 0}, "threadpool_count must be .* found 0"),
        ({"cpuinfer_threads": 0}, "number of threads must be .* found 0"),
        ({"numa_nodes": [0]}, r"numa_nodes must have threadpool_count = 2 entries, found \[0\]"),
        ({"num_gpu_experts": -1}, "num_gpu_experts must be .* found -1"),
        ({"gpu_experts_mask": np.zeros(7, bool)}, r"gpu_experts_mask must be bool \[8\], found bool \[7\]"),
        ({"gpu_experts_mask": np.zeros(8, bool), "num_gpu_experts": 2}, "num_gpu_experts must be left out or be .* 0; found 2"),
        ({"swiglu_limit": -1.0}, "swiglu_limit must be 0 or more, found -1"),
        ({"swiglu_limit": "10"}, "swiglu_limit must be 0 or more, found '10'"),
        ({"swiglu_alpha": float("nan")}, "swiglu_alpha must be 0 or more, found nan"),
    ],
)
def test_wrong_arguments(changed, message):
    with pytest.raises(ValueError, match=message) as caught:
        KTMoEWrapper(**arguments(**changed))
    assert caught.type is InputError


def test_threads():
    KTMoEWrapper(**arguments(cpuinfer_threads=3))
    assert ktmoe.get_num_threads() == 3


@pytest.mark.parametrize(
    ("nodes", "parts", "wanted", "expected"),
    [
        ((), 2, None, None),
        ((0,), 1, None, None),
        ((0,), 2, None, None),  # a desktop, with a server's command line
        ((0,), 2, [0, 1], None),
        ((0,), 1, [0], [0]),
        ((0,), 1, [1], [1]),  # which does not exist: MoELayer says so
        ((0, 1), 1, None, [0]),
        ((0, 1), 2, None, None),  # all, which is the default
        ((0, 1), 4, None, None),
        ((0, 1), 1, [1], [1]),
        ((0, 1), 2, [1, 0], [1, 0]),
        ((0, 1), 3, [2, 1, 0], [1, 0]),
        ((0, 2, 3), 2, None, [0, 2]),
    ],
)
def test_numa_nodes(monkeypatch, folder, nodes, parts, wanted, expected):
    given = []

    class Recorder(MoELayer):
        def __init__(self, experts, *, numa_nodes):
            given.append(numa_nodes)
            super().__init__(experts)

    monkeypatch.setattr(numa, "nodes", lambda: {node: frozenset({0}) for node in reversed(nodes)})
    monkeypatch.setattr(kt_kernel, "MoELayer", Recorder)
    wrapper(folder, threadpool_count=parts, numa_nodes=wanted).close()
    assert given == [expected]


@pytest.mark.parametrize(
    ("parts", "wanted", "expected"),
    [(1, None, (0,)), (2, None, (0, 1)), (8, None, (0, 1)), (1, [1], (1,)), (2, [1, 0], (1, 0))],
)
def test_on_numa_nodes(checkpoint, fake_nodes, parts, wanted, expected):
    """One part a node, added up within the bound."""
    method, folder = checkpoint
    fake_nodes({0: {0}, 1: {0}})
    with wrapper(folder, method=method, threadpool_count=parts, numa_nodes=wanted) as w:
        layer = w.moe
        assert layer.placement.nodes == expected
        x, ids, scores = batch(1, 9)
        assert_right(layer, load_experts(folder, 0), x, ids, scores, w.forward(x, ids, scores))


# What goes wrong with weights and calls


def test_weights_that_do_not_fit(checkpoint, tmp_path):
    method, folder = checkpoint
    other = METHODS[METHODS.index(method) - 1]
    with pytest.raises(FormatError, match=f"method '{other}' expects .*, found (q4 with|b16)"):
        wrapper(folder, method=other)
    with pytest.raises(InputError, match=r"sizes? must be \(256, 128\) as given, found \(128, 128\)"):
        wrapper(folder, method=method, hidden_size=256)
    with pytest.raises(MissingTensorError):
        wrapper(folder, 9, method=method)
    for physical, message in (
        (np.arange(7), r"must be integers \[8\], one per expert of the layer, found int64 \[7\]"),
        (np.arange(8.0), r"must be integers \[8\].*found float64"),
        (np.full(8, 8), r"must be in \[0, 8\), the checkpoint's experts; found 8"),
        (np.full(8, -1), "must be in .*found -1"),
    ):
        with pytest.raises(InputError, match=f"physical_to_logical_map {message}"):
            wrapper(folder, physical=physical, method=method)
    with pytest.raises(InputError, match="load_weights needs weight_path"):
        wrapper("", method=method)
    assert weights.Lease._open == {}  # a load that failed keeps nothing


def test_tensors_that_do_not_fit():
    good = np.zeros((EXPERTS, INTERMEDIATE, HIDDEN), BF16)
    w = KTMoEWrapper(**arguments(method="BF16"))
    with pytest.raises(InputError, match="up_proj must be bfloat16, found a float32 array"):
        w.load_weights_from_tensors(good, good.astype(np.float32), good)
    with pytest.raises(FormatError, match="must hold 8 experts, found 7"):
        w.load_weights_from_tensors(good, good[:7], good)
    with pytest.raises(InputError, match="method must be 'BF16', found 'MXFP4'"):
        KTMoEWrapper(**arguments()).load_weights_from_tensors(good, good, good)


def test_wrong_calls(folder):
    x, ids, scores = batch()
    with wrapper(folder) as w:
        for call, message in (
            ((x[:, 1:], ids, scores), r"hidden_states must have shape \[tokens, 128\], found \[5, 127\]"),
            ((x[0], ids, scores), r"hidden_states must have shape \[tokens, 128\], found \[128\]"),
            (([0], ids, scores), "hidden_states must be a numpy array or a torch tensor, found list"),
            ((x.astype(int), ids, scores), "hidden_states must be floating-point numbers, found int64"),
            ((x, ids[:4], scores), r"topk_ids must have shape \[5, top_k\], found \[4, 4\]"),
            ((x, ids, scores[:, :3]), r"topk_weights must have shape \[5, top_k\], found \[5, 3\]"),
            ((x, ids.astype(float), scores), "topk_ids must be integers, found float64"),
            ((x, ids, ids), "topk_weights must be floating-point numbers, found int64"),
        ):
            with pytest.raises(InputError, match=message):
                w.forward(*call)
        with pytest.raises(InputError, match="sync_forward needs a submit_forward before it"):
            w.sync_forward(x)
        assert len(ENGINE.pool._last) <= 1  # what failed took no buffers with it
    with pytest.raises(InputError, match=r"load_weights\(\) must come first"):
        KTMoEWrapper(**arguments()).forward(x, ids, scores)


def test_an_error_of_a_task_is_raised_by_sync(folder, monkeypatch):
    x, ids, scores = batch()
    with wrapper(folder) as w:
        expected = w.forward(x, ids, scores)
        with monkeypatch.context() as patch:
            patch.setattr(MoELayer, "forward", lambda *_, **__: 1 / 0)
            w.submit_forward(x, ids, scores)
            with pytest.raises(ZeroDivisionError):
                w.sync_forward(x)
        assert same_bits(w.forward(x, ids, scores), expected)


# Buffers


def test_arguments_may_change_after_submit(folder):
    x, ids, scores = batch()
    with wrapper(folder) as w:
        expected = w.forward(x, ids, scores)
        w.submit_forward(x, ids, scores)
        x[...], ids[...], scores[...] = 0, 0, 0
        assert same_bits(w.sync_forward(x), expected)


def test_results_are_the_callers(folder):
    """Unless their size is captured: then a slot has one."""
    x, ids, scores = batch()
    with wrapper(folder) as w:
        first = w.forward(x, ids, scores)
        kept = first.copy()
        w.forward(np.negative(x), ids, scores)
        assert same_bits(first, kept)


def address(array):
    return array.__array_interface__["data"][0]


def test_captured_sizes_keep_their_buffers(folder):
    KTMoEWrapper.set_capture_batch_sizes([5, 2])
    assert KTMoEWrapper.get_capture_batch_sizes() == [5, 2]
    with wrapper(folder, 0) as even, wrapper(folder, 1) as odd, wrapper(folder, 2) as next_even:
        places = {}
        for turn in range(3):
            for tokens in (5, 2, 7, 3):  # the others come and go
                x, ids, scores = batch(turn, tokens)
                for w in (even, odd, next_even):
                    places.setdefault((tokens, w.layer_idx), set()).add(address(w.forward(x, ids, scores)))
        for tokens in (5, 2):
            assert len(places[tokens, 0]) == len(places[tokens, 1]) == 1
            assert places[tokens, 0] == places[tokens, 2] != places[tokens, 1]
        assert {key.tokens for key in ENGINE.pool._kept} == {5, 2}
        assert {key.tokens for key in ENGINE.pool._last} == {3}
    KTMoEWrapper.clear_buffer_cache()
    assert not ENGINE.pool._kept
    assert not ENGINE.pool._last
    with pytest.raises(InputError, match="capture_bs must be a whole number, 1 or more, found 0"):
        KTMoEWrapper.set_capture_batch_sizes([1, 0])


# Threads


def test_many_threads(folder):
    """forward() from several threads, on one layer and on several; submit and sync beside it."""
    KTMoEWrapper.set_capture_batch_sizes([3])
    layers = [wrapper(folder, layer) for layer in range(3)]
    cases = [(w, batch(seed, tokens)) for seed, tokens in enumerate((1, 3, 3, 6)) for w in layers]
    expected = [w.forward(*case).copy() for w, case in cases]
    barrier = threading.Barrier(4)

    def work(first):
        barrier.wait()
        for turn in range(12):
            which = (first + turn) % len(cases)
            w, case = cases[which]
            if case[0].shape[0] == 3:
                continue  # a captured size's result is overwritten by the next call
            assert same_bits(w.forward(*case), expected[which])

    with ThreadPoolExecutor(4) as pool:
        for job in [pool.submit(work, 3 * number) for number in range(4)]:
            job.result()
    for w in layers:
        w.close()


def test_layers_submitted_before_one_is_asked_for(folder):
    """Of the same slot, too: none overwrites another's buffers."""
    layers = [wrapper(folder, layer) for layer in range(3)]
    cases = [batch(seed) for seed in range(3)]
    expected = [w.forward(*case) for w, case in zip(layers, cases, strict=True)]
    for w, case in zip(layers, cases, strict=True):
        w.submit_forward(*case)
    for w, case, y in zip(layers, cases, expected, strict=True):
        assert same_bits(w.sync_forward(case[0]), y)
        w.close()


def test_the_last_submission_counts(folder):
    """A pass may be broken off between submit and sync."""
    with wrapper(folder) as w:
        w.submit_forward(*batch(1))
        w.submit_forward(*batch(2, 7))
        y = w.sync_forward()
        assert same_bits(y, w.forward(*batch(2, 7)))
        with pytest.raises(InputError, match="needs a submit_forward"):
            w.sync_forward()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_fork(folder):
    """The child has neither the worker nor what it was to do: its passes are its own, and ours go on."""
    first, second = (wrapper(folder, layer, max_deferred_experts_per_token=2 - 2 * layer) for layer in range(2))
    case = batch(0, 2)

    def both(w):
        w.submit_forward(*case)
        return w.forward(*case).tobytes(), w.sync_forward().tobytes()

    alone = both(second)
    first.forward(*case)
    assert in_child(lambda: both(second)) == alone
    with_deferred, after = both(second)[::-1]
    assert after == alone[0] != with_deferred
    first.close()
    second.close()


# What is shared, and given back


def test_one_checkpoint_for_all_layers(folder, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(folder)
    layers = [wrapper(folder, 0), wrapper(link, 1), wrapper(f"{folder}/.", 2)]
    (shared,) = weights.Lease._open.values()
    layers[0].close()
    layers[1].close()
    assert list(weights.Lease._open.values()) == [shared]
    layers[2].close()
    layers[2].close()
    assert not weights.Lease._open
    with pytest.raises(ClosedError):
        shared.checkpoint.info(next(iter(shared.checkpoint.names())))


def test_close(folder):
    x, ids, scores = batch()
    w = wrapper(folder)
    w.submit_forward(x, ids, scores)
    w.close()
    w.close()
    for call in (lambda: w.forward(x, ids, scores), w.load_weights):
        with pytest.raises(ClosedError, match="close"):
            call()
    with pytest.raises(ClosedError, match="close"):
        w.submit_write_weight_scale_to_buffer(1, 0, [1], [1], [1], [1])


def test_loading_again_replaces(folder):
    x, ids, scores = batch()
    with wrapper(folder, physical=REVERSED) as w, MoELayer.from_checkpoint(folder, 0) as layer:
        w.load_weights()
        assert same_bits(w.forward(x, ids, scores), layer.forward(x, ids, scores))
        (shared,) = weights.Lease._open.values()
        assert shared.leases == 1


def test_a_dropped_wrapper_gives_everything_back(folder):
    w = wrapper(folder)
    w.forward(*batch())
    gone = weakref.ref(w), weakref.ref(w.moe)
    del w
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert not weights.Lease._open


def test_a_dropped_wrapper_waits_for_nobody(folder):
    """A finalizer runs wherever the garbage collector does: in a thread that has locks which others wait for."""
    w, held, go = wrapper(folder), threading.Event(), threading.Event()

    def hold():
        with ENGINE.order, weights.Lease._order:
            held.set()
            assert go.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    gives_up = threading.Timer(10, go.set)
    gives_up.start()
    del w
    gc.collect()
    assert not go.is_set()
    gives_up.cancel()
    assert weights.Lease._open
    go.set()
    holder.join()
    assert not weights.Lease._open
    assert not ENGINE.passes._layers


def test_a_dropped_wrapper_changes_nothing_under_its_thread(folder):
    w = wrapper(folder)
    with ENGINE.order, weights.Lease._order:
        del w
        gc.collect()
        assert weights.Lease._open
        assert ENGINE.passes._layers
    assert not weights.Lease._open
    assert not ENGINE.passes._layers


# generate_gpu_experts_masks


def test_generate_masks():
    frequency = np.array([[0.1, 0.5, 0.3, 0.8], [0.2, 0.4, 0.9, 0.1]])
    masks = generate_gpu_experts_masks(frequency, 3)
    assert masks.dtype == bool
    assert masks.tolist() == [[False, True, False, True], [False, False, True, False]]
    for number, expected in ((0, 0), (-2, 0), (8, 8), (100, 8)):
        assert generate_gpu_experts_masks(frequency, number).sum() == expected


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8])
def test_generate_masks_against_a_sort(dtype):
    """With many ties: the first expert of the first layer wins."""
    frequency = np.random.default_rng(0).integers(0, 4, (5, 7)).astype(dtype)
    for number in range(36):
        order = sorted(np.ndindex(5, 7), key=lambda place: (-int(frequency[place]), place))
        expected = np.zeros((5, 7), bool)
        for place in order[:number]:
            expected[place] = True
        assert np.array_equal(generate_gpu_experts_masks(frequency, number), expected)


def test_generate_masks_of_what_is_no_table():
    with pytest.raises(InputError, match=r"activation_freq must have shape \[layers, experts\], found \[3\]"):
        generate_gpu_experts_masks(np.zeros(3), 1)
    with pytest.raises(InputError, match="activation_freq must be a numpy array or a torch"):
        generate_gpu_experts_masks([[1.0]], 1)
