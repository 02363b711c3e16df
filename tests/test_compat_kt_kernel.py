"""KTMoEWrapper on numpy arrays: its results, arguments, weights and masks."""

import inspect
import sys
import threading
from types import ModuleType

import numpy as np
import pytest
from helpers import assert_right, same_bits
from kt_wrappers import EXPERTS, HIDDEN, INTERMEDIATE, REVERSED, TOP_K, WRITERS, arguments, batch, wrapper, write

import ktmoe
from ktmoe import GatedActivation, MoELayer, load_experts
from ktmoe.compat import inference, methods, provided
from ktmoe.compat.kt_kernel import KTMoEWrapper
from ktmoe.errors import InputError, UnavailableError
from ktmoe.machine import numa

pytestmark = pytest.mark.usefixtures("nothing_is_left")

METHODS = tuple(WRITERS)


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
    ("nodes", "shards", "wanted", "expected"),
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
def test_numa_nodes(monkeypatch, folder, nodes, shards, wanted, expected):
    given = []

    class Recorder(MoELayer):
        def __init__(self, experts, *, numa_nodes):
            given.append(numa_nodes)
            super().__init__(experts)

    monkeypatch.setattr(numa, "nodes", lambda: {node: frozenset({0}) for node in reversed(nodes)})
    monkeypatch.setattr(inference, "MoELayer", Recorder)
    wrapper(folder, threadpool_count=shards, numa_nodes=wanted).close()
    assert given == [expected]


@pytest.mark.parametrize(
    ("shards", "wanted", "expected"),
    [(1, None, (0,)), (2, None, (0, 1)), (8, None, (0, 1)), (1, [1], (1,)), (2, [1, 0], (1, 0))],
)
def test_on_numa_nodes(checkpoint, fake_nodes, shards, wanted, expected):
    """One shard a node, added up within the bound."""
    method, folder = checkpoint
    fake_nodes({0: {0}, 1: {0}})
    with wrapper(folder, method=method, threadpool_count=shards, numa_nodes=wanted) as w:
        layer = w.moe
        assert layer.placement.nodes == expected
        x, ids, scores = batch(1, 9)
        assert_right(layer, load_experts(folder, 0), x, ids, scores, w.forward(x, ids, scores))


def test_the_name_kt_kernel(monkeypatch):
    """It is ktmoe's, also where kt-kernel is imported already. Names that only begin so stay."""
    others = {name: module for name, module in sys.modules.items() if name.partition(".")[0] != "kt_kernel"}
    others["kt_kernel_ext"] = ModuleType("kt_kernel_ext")
    imported = {name: ModuleType(name) for name in ("kt_kernel", "kt_kernel.utils", "kt_kernel.utils.amx")}
    monkeypatch.setattr(sys, "modules", others | imported)
    provided.provide()
    assert sys.modules == others | provided.MODULES
